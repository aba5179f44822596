"""Following a start until it is ready: what happens, how long it usually takes, and why it is slow."""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from corral.base.errors import LaunchError
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, load_json
from corral.base.wording import duration
from corral.deploy.deployment.diagnosis import explain_slow
from corral.deploy.deployment.events import Event, read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import Expected, Phase, durations, expected_of, remember_start
from corral.deploy.deployment.state import Reason, State
from corral.deploy.lifecycle import deployments
from corral.deploy.lifecycle.tunnel import ensure_tunnel
from corral.plan import measured as calibration
from corral.plan.contract import Plan
from corral.plan.measured import read_log, reconcile


class Lines:
    """Reports a start on stderr, a line for each phase: for programs that start a model from Python."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._began, self._phase = quiet, time.monotonic(), ""

    def phase(self, name: str, expected: Expected | None = None) -> None:
        if name != self._phase:
            self._phase = name
            self._write(f"{name} ({expected.text})" if expected else name)

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None:
        if news:
            self._write(text)

    def note(self, text: str) -> None:
        self._write(f"note: {text}")

    def _write(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"[{time.monotonic() - self._began:6.1f} s] {text}\n")


class Reporter(Protocol):
    """Shows a start to the user."""

    def phase(self, name: str, expected: Expected | None = None) -> None:
        """A new phase begins; how long it usually takes, where that is known."""

    def detail(self, text: str, done: int = 0, total: int = 0, news: bool = False) -> None:
        """Progress of the phase; `news` gets a line of its own on a screen that only has lines."""

    def note(self, text: str) -> None:
        """A note that does not stop the start."""


def wait_ready(folder: DeploymentFolder, report: Reporter) -> deployments.Status:
    """Follow a deployment until it is ready; raise the reason when it ends instead, or can never start."""
    final: deployments.Status | None = None
    expected = expected_of(folder)
    for item in deployments.watch(folder):
        if isinstance(item, Event):
            _show(item, report, expected, shlex.quote(folder.name))
        else:
            final = item
    assert final is not None
    if final.state is State.READY:
        learn_from(folder)
        ensure_tunnel(folder)
        report.phase(Phase.READY)
        return replace(final, endpoint=deployments.endpoint_of(folder, final.state))  # the tunnel may have moved it
    reason = final.reason.value if final.reason else ""
    log = folder.rank(0).log
    how = "cannot start" if final.reason is Reason.CANNOT_START else str(final.state)
    why = final.text or reason.replace("_", " ") or "no reason is known"
    raise LaunchError(
        f"{final.name!r} {how}: {why}.",
        final.remedy,
        name=final.name,
        state=final.state.value,
        reason=reason,
        log=str(log),
    )


def learn_from(folder: DeploymentFolder) -> None:
    """Compare the plan with what the engine reported, once per deployment; later plans use the difference."""
    if folder.differences.exists() or not folder.plan.is_file():
        return
    if kind := load_json(deployments.Record, folder.record).kind:
        remember_start(kind, durations(read_events(folder.rank(0).events)))
    with folder.rank(0).log.open(encoding="utf-8", errors="replace") as lines:
        observed = read_log(itertools.islice(lines, 20_000))
    differences = reconcile(load_json(Plan, folder.plan), observed)
    write_atomic(folder.differences, dump_json(differences))
    calibration.append_lesson(home_dir(), differences)


def _show(event: Event, report: Reporter, expected: Mapping[str, Expected], name: str) -> None:
    if event.kind == "state" and event.get("state") in (State.STARTING, State.LOADING):
        report.phase(str(event.get("state")), expected.get(str(event.get("state"))))
    elif event.kind == "phase":
        report.phase(str(event.get("phase")), expected.get(str(event.get("phase"))))
        if event.get("total"):
            report.detail("", int(event.get("done", 0)), int(event.get("total")))
    elif event.kind == "observed" and (text := _observed_text(event.details)):
        report.detail(text)
    elif event.kind == "status":
        report.phase(str(event.get("state")))
        report.detail(str(event.get("text")), news=True)
    elif event.kind == "slow":
        report.note(slow_text(event.details, expected, name))
    elif event.kind == "restart":
        why = event.get("text") or str(event.get("reason")).replace("_", " ")
        report.note(f"restart {event.get('attempt')} of {event.get('of')}: {why}")


def slow_text(details: Mapping[str, Any], expected: Mapping[str, Expected], name: str) -> str:
    """A note on a phase that lasts too long: how long, the engine's last line, and what is likely wrong."""
    phase, line = str(details.get("phase")), str(details.get("line") or "")
    usual = expected.get(phase) or Expected(float(details.get("usual_s") or 0))
    parts = [f"{phase} has lasted {duration(float(details.get('lasted_s') or 0))} ({usual.text})."]
    if line:
        parts.append(f"The engine's last line: {line.rstrip('.')}.")
    if why := explain_slow([*details.get("lines", ()), line], name, phase):
        parts.append(f"Likely: {why.cause}. {why.remedy}")
    return " ".join(parts)


OBSERVED_TEXTS = {
    "weights_gib": "weights {} GiB",
    "load_s": "loaded in {} s",
    "compile_s": "compiled in {} s",
    "kv_tokens": "KV cache {:,} tokens",
    "graph_gib": "graphs {} GiB",
}


def _observed_text(values: Mapping[str, Any]) -> str:
    return ", ".join(text.format(values[name]) for name, text in OBSERVED_TEXTS.items() if name in values)

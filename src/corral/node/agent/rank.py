"""One rank's engine: starting it, watching its log, processes and server, and ending all of it."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import time
from typing import Any, Dict, Optional, Set, Tuple

from ..files import write_json
from ..processes import (
    MARKER,
    descendants,
    disk_bytes,
    end_all,
    identity,
    kernel_oom_kills,
    prepare_engine,
    process_table,
    signal_name,
)
from ..states import Reason, State
from .container import Container
from .journal import Journal, private_tmp
from .probe import LoadLog, Probe, Server
from .start_progress import PROGRESS_NAMES, WAITING, EngineLog, StartProgress, read_line

Json = Dict[str, Any]
TICK_S = 0.2
SERVED = (State.READY, State.DRAINING)
HEARTBEAT_S = 2.0
STOPPED_S = 6.0  # a rank of several whose processes are all stopped for this long counts as hung
DRAIN_CHECK_S = 1.0


class Rank:
    """Runs the engine once per attempt; a `Worker` adds restarts and the other ranks."""

    def __init__(self, spec: Json, journal: Journal) -> None:
        self.spec = spec
        self.patience: Json = spec["patience"]
        self.journal = journal
        self.supervisor = os.getppid()
        self.phase = "starting"
        self.progress: Json = {}
        self.last_progress: Tuple[Any, ...] = ()
        self.log = EngineLog(spec["log"])
        self.container = Container(spec)
        self.running = False
        self.ended: Optional[Json] = None  # how this rank's last attempt ended
        self.activity_at = self.ended_at = time.monotonic()
        self.start_progress = StartProgress(spec.get("expected"), time.monotonic())

    @property
    def state(self) -> State:
        return self.journal.state

    # ------------------------------------------------------------------- what a `Worker` with other ranks overrides
    def _others(self) -> Optional[Tuple[str, Json]]:
        """Why this rank must end because of other ranks, if it must."""
        return None

    def _note_end(self, attempt: int, reason: str, details: Json) -> None:
        """The engine has ended, or must; its processes may still run."""
        self.ended_at = time.monotonic()

    def _quiet_s(self, now: float) -> float:
        """Seconds since anything moved."""
        return now - self.activity_at

    def _still_s(self, now: float) -> float:
        """Seconds since the start last advanced."""
        return now - self.start_progress.advanced_at

    # -------------------------------------------------------------------------------------------------- one attempt
    def _run_once(self, attempt: int) -> Tuple[str, Json]:
        """Start the engine and watch it until it ends: (reason, details)."""
        log_from = self.log.skip()
        self.oom_kills = kernel_oom_kills()
        self.container.forget()
        self.ended, self.running, self.activity_at = None, True, time.monotonic()
        self.start_progress = StartProgress(self.spec.get("expected"), self.activity_at)
        try:
            self.engine = self._start()
        except OSError as error:
            self.running = False
            broken = {"text": "the engine could not be started: %s" % error}
            self._note_end(attempt, Reason.ENGINE_BROKEN, broken)
            return Reason.ENGINE_BROKEN, broken
        with contextlib.suppress(OSError):
            write_json(self.spec["engine_file"], identity(self.engine.pid))
        self._set_state(State.STARTING, attempt=attempt, pid=self.engine.pid)
        self.probe = self._probe()
        reason, details = self._watch()
        if self.probe:
            self.probe.stopping.set()
        if reason == Reason.ENGINE_EXITED:
            details.update(was_ready=self.state is State.READY, log_from=log_from)
            if kernel_oom_kills() > self.oom_kills:  # within the last heartbeat
                details["kernel_oom_kill"] = True
        self._note_end(attempt, reason, details)
        if self.state is State.READY:
            self._set_state(State.DRAINING, **_why(reason, details))  # no longer ready, and not yet ended
        # a container's client forwards the signal and stays until the container has ended
        end_all(self._own_processes if self.container else self._engine_processes, self.patience["grace_s"])
        self.container.remove()
        self.running = False
        self._read_log()
        return reason, details

    def _probe(self) -> Optional[Probe]:
        """The probe of this rank's server, already started; None where the rank serves nothing."""
        serve, gang = self.spec.get("serve"), self.spec.get("gang")
        if not serve:
            return None
        load = LoadLog(self.spec.get("load", ""))
        probe = Probe(Server(serve), self.patience, self.container, self._note_trouble, bool(gang), load)
        probe.start()
        return probe

    def _note_trouble(self, text: str) -> None:
        self.journal.write("trouble", text="the server could not be probed: %s" % text)

    def _start(self) -> "subprocess.Popen[bytes]":
        env = {k: v for k, v in os.environ.items() if k not in self.spec.get("unset_env", [])}
        env.update(self.spec["env"])
        env[MARKER] = self.spec["launch_id"]
        env["TMPDIR"] = private_tmp(self.spec["launch_id"])
        os.makedirs(env["TMPDIR"], mode=0o700, exist_ok=True)
        log = os.open(self.spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            return subprocess.Popen(
                self.spec["argv"],
                env=env,
                cwd=self.spec["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare_engine,
            )
        finally:
            os.close(log)

    def _own_processes(self) -> Set[int]:
        found = descendants(os.getpid())
        if not found and self.engine.poll() is None:
            found = {self.engine.pid}
        return found

    def _engine_processes(self) -> Set[int]:
        return self._own_processes() | self.container.processes()

    def _watch(self) -> Tuple[str, Json]:
        beat = self.activity_at = time.monotonic()
        halted = 0
        last_ticks = last_bytes = 0
        checked = 0.0
        idle_s = self.patience["idle_s"]
        window = min(10.0, idle_s / 4)
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if self._read_log():
                self.activity_at = now
            code = self.engine.poll()
            if code is not None:
                return self._exit_reason(code)
            if self._stop_requested():
                return Reason.REQUESTED, {}
            if os.getppid() != self.supervisor:
                return Reason.AGENT_KILLED, {"text": "the agent's supervisor process was killed"}
            others = self._others()
            if others:
                return others
            drained = self._drained(now)
            if drained:
                return drained
            if self.probe and self.probe.fault and self.state is not State.DRAINING:
                return self.probe.fault.reason, self.probe.fault.details()
            if self.probe and self.probe.ready and self.state not in SERVED:
                self._read_log()  # what the engine logged before it answered
                self._set_state(State.READY, **self.probe.ready)
            if now - beat >= HEARTBEAT_S or not checked:
                beat = now
                self._beat()
                halted = halted + 1 if self.spec.get("gang") and self._processes_stopped() else 0
                if halted * HEARTBEAT_S >= STOPPED_S:
                    return Reason.ENGINE_HUNG, {"text": "its processes were stopped by a signal and do nothing"}
                if self.engine.poll() is None:
                    self.oom_kills = kernel_oom_kills()
                self.log.trim()
            if now - checked >= window:
                processes = self._engine_processes()
                table = process_table()
                ticks = sum(table[pid][2] for pid in processes if pid in table)
                moved = disk_bytes(processes)
                if ticks - last_ticks > 5 * window or moved - last_bytes > 1 << 20:  # 5% of a core, or 1 MiB
                    self.activity_at = now
                self.start_progress.read(moved, now)
                last_ticks, last_bytes, checked = ticks, moved, now
            late = None if self.state in SERVED else self._late(now, idle_s)
            if late:
                return late

    def _late(self, now: float, idle_s: float) -> Optional[Tuple[str, Json]]:
        """Why this start is given up, if it is; notes in the journal when it takes longer than usual."""
        if self._quiet_s(now) > idle_s:
            text = "no log line, processor time or disk traffic for %d s while %s" % (idle_s, self.phase)
            return Reason.STALLED, dict(self.start_progress.log_lines(), text=text)
        still = self._still_s(now)
        if still > self.start_progress.limit_s():
            return Reason.NOT_ADVANCING, self.start_progress.overdue(still, now)
        slow = self.start_progress.slow(now)
        if slow:
            self.journal.write("slow", **slow)
        return None

    def _processes_stopped(self) -> bool:
        """Whether all processes of the rank are stopped by a signal: the other ranks would wait for it."""
        table = process_table()
        states = [table[pid][3] for pid in self._engine_processes() if pid in table]
        return bool(states) and all(state in "Tt" for state in states)

    def _drained(self, now: float) -> Optional[Tuple[str, Json]]:
        """Why this rank ends because of a drain, once no request runs any more or the drain's time is up."""
        path = self.spec.get("drain_file")
        if not path or not os.path.exists(path):
            return None
        if self.state not in SERVED:
            return Reason.WALLTIME, {"text": "the time limit was near before it was ready"}
        if self.state is State.READY:
            seconds = 60.0
            with contextlib.suppress(OSError, ValueError), open(path) as file:
                seconds = float(file.read())
            self.drain_until, self.drain_check, self.idle_checks = now + seconds, now + 2 * DRAIN_CHECK_S, 0
            self._set_state(State.DRAINING, reason=Reason.WALLTIME, text="the time limit is near: no new requests")
        if now >= self.drain_until:
            return Reason.WALLTIME, {"text": "the time limit came before all running requests had ended"}
        if now >= self.drain_check:
            self.drain_check = now + DRAIN_CHECK_S
            with contextlib.suppress(OSError, http.client.HTTPException):
                busy = self.probe.server.counters()[0] if self.probe else 0
                self.idle_checks = 0 if busy else self.idle_checks + 1
        if self.idle_checks >= 2:
            return Reason.WALLTIME, {"text": "the time limit was near; all running requests had ended"}
        return None

    def _exit_reason(self, code: int) -> Tuple[str, Json]:
        if self._stop_requested():
            return Reason.REQUESTED, {}
        if self.container and 128 < code <= 128 + 64:
            code = 128 - code  # a container's client reports a signal this way
        details: Json = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        how = "with code %d" % code if code >= 0 else "by signal %d (%s)" % (-code, signal_name(-code))
        what = "the engine"
        if self.container:
            what, details["container"] = "the engine's container", True
        details["text"] = "%s ended %s while %s, and nobody asked it to" % (what, how, self.phase)
        return Reason.ENGINE_EXITED, details

    def _stop_requested(self) -> bool:
        return os.path.exists(self.spec["stop_file"])

    def _set_state(self, state: State, **details: Any) -> None:
        if state in (State.STARTING, State.LOADING, State.READY):
            self.phase = state.value
            self.start_progress.enter(self.phase, time.monotonic())
        self.journal.write_state(state, **details)
        self._beat()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            write_json(self.spec["heartbeat"], {"t": time.time(), "state": self.state, "phase": self.phase})

    def _read_log(self) -> bool:
        """Turn new log lines into events; whether any of them is more than waiting."""
        progress = False
        for line in self.log.new_lines():
            progress = progress or not WAITING.search(line)
            if self.state is State.READY:
                continue
            self.start_progress.note_line(line)
            reading = read_line(line)
            if reading:
                self._note(*reading)
        return progress

    def _note(self, phase: Optional[str], values: Json) -> None:
        if phase == "loading" and self.state is State.STARTING:
            self._set_state(State.LOADING)
        progress = {name: values.pop(name) for name in PROGRESS_NAMES if name in values}
        key = (phase, *progress.values())
        if phase and (phase != self.phase or progress) and key != self.last_progress:
            self.last_progress = key
            self.phase = phase
            self.progress = progress
            self.start_progress.enter(phase, time.monotonic())
            self.start_progress.advance(time.monotonic())
            self.journal.write("phase", phase=phase, **progress)
        if values:
            self.start_progress.advance(time.monotonic())
            self.journal.write("observed", **values)


def _why(reason: str, details: Json) -> Json:
    """Why a rank is going down, unless it was asked to."""
    if reason not in {known.value for known in Reason} - {Reason.REQUESTED.value}:
        return {}
    return {"reason": reason, "text": details.get("text", "")}

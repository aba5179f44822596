"""Why did the engine end, and why does a start take so long? The tables of `signatures` held against a log.

A cause that no row knows is reported as unknown, with the log's own last error instead of a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.deploy.deployment.signatures import SIGNATURES, SLOW
from corral.deploy.deployment.state import Reason

TAIL_BYTES = 256 << 10


@dataclass(frozen=True)
class Diagnosis:
    """What happened and what to do."""

    reason: Reason
    cause: str
    remedy: str
    evidence: str = ""  # the line that said so


# what can only go wrong before a server has answered; later, such a line comes from a bad request
START_ONLY = frozenset({
    Reason.NO_RUNTIME, Reason.NO_IMAGE, Reason.NAME_TAKEN, Reason.PORT_TAKEN, Reason.BAD_ARGUMENT,
    Reason.BAD_PARALLELISM, Reason.CONTEXT_TOO_LONG, Reason.GATED_MODEL, Reason.MODEL_INCOMPLETE,
    Reason.MODEL_UNSUPPORTED,
})  # fmt: skip


def last_lines(log: Path, count: int = 40, begin: int = 0) -> list[str]:
    """The end of a log (from byte `begin` on), cheaply, whatever its size; a progress bar counts as one line."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - TAIL_BYTES, begin if begin <= size else 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in lines if line][-count:]


def diagnose(
    lines: Sequence[str],
    exit_code: int | None = None,
    signal: int | None = None,
    kernel_oom_kill: bool = False,
    was_ready: bool = False,
    container: bool = False,
    name: str = "NAME",
) -> Diagnosis:
    """The cause of an engine's end, from the end of its log and the way it ended; `name` as the shell takes it."""
    if kernel_oom_kill:
        return Diagnosis(
            Reason.OUT_OF_HOST_MEMORY,
            "the kernel killed the engine because the machine ran out of memory",
            "Close other programs, ask for a shorter --context, or choose a smaller model.",
        )
    text = "\n".join(lines)
    for row in SIGNATURES:
        if row.reason in START_ONLY and (was_ready or signal == 9):
            continue
        if match := re.search(row.pattern, text, re.DOTALL):
            return Diagnosis(row.reason, _fill(row.cause, match), _fill(row.remedy, match), _line_of(text, match))
    if signal == 9 or (container and signal == 15):
        return _ended_from_outside(signal, container)
    if error := _last_error(lines):
        return Diagnosis(
            Reason.ENGINE_EXITED, f"the engine ended with: {error}", f"The whole log: `corral logs {name}`.", error
        )
    how = f"with code {exit_code}" if exit_code is not None else f"by signal {signal}" if signal else "by itself"
    return Diagnosis(
        Reason.ENGINE_EXITED,
        f"the engine ended {how} without saying why",
        "Start it again (`corral up … --restart 3` does so by itself); if it repeats, the whole log is in "
        f"`corral logs {name}`.",
    )


def explain_slow(lines: Iterable[str], name: str, phase: str = "") -> Diagnosis | None:
    """The likely cause of a start that takes too long, from the engine's lines; None when none of them shows it."""
    text = "\n".join(lines)
    for row in SLOW:
        if match := re.search(row.pattern, text, re.IGNORECASE):
            return Diagnosis(row.reason, _fill(row.cause, match), row.remedy.format(name=name), match.group(0))
    if phase in ("compiling", "warming", "starting"):
        return Diagnosis(
            Reason.NOT_ADVANCING,
            "the machine is busy with other work, or this is the first start of its kind, which compiles",
            "`uptime` shows how busy it is; a second start finds the compiled code.",
        )
    return None


def _ended_from_outside(signal: int, container: bool) -> Diagnosis:
    if container:
        word = "killed" if signal == 9 else "stopped"
        return Diagnosis(
            Reason.ENGINE_EXITED,
            f"the engine's container was {word} from outside (signal {signal}): by `docker kill`, `stop` or"
            " `rm -f`, or by the kernel for lack of memory",
            "Ask who looks after the containers of that node; start it again with `corral up`.",
        )
    return Diagnosis(
        Reason.ENGINE_EXITED,
        "the engine was killed from outside (signal 9): by the kernel for lack of memory, a person or a scheduler",
        "Look at `dmesg` or ask the administrator; start it again with `corral up`.",
    )


def _fill(text: str, match: re.Match[str]) -> str:
    """The text with the pattern's groups in it, in one pass: a log may itself hold braces."""
    text = re.sub(r"\{(\d)\}", lambda found: (match.group(int(found[1])) or "").strip(), text)
    return " ".join(text.split()).replace(" )", ")").replace("(--context )", "(--context)")


def _line_of(text: str, match: re.Match[str]) -> str:
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.start())
    return text[start : end if end >= 0 else None].strip()[:300]


_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: .+")
# errors that only say that another error came before them
_ECHO = re.compile(
    r"EngineDeadError|Engine core initialization failed|stack trace|Worker failed with error|root cause"
)


def _last_error(lines: Sequence[str]) -> str:
    for line in reversed(lines):
        if (match := _ERROR.search(line)) and not _ECHO.search(line):
            return match.group(0)[:300].rstrip(".")
    return ""

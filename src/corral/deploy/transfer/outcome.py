"""What is brought where, how far it is, and what became of it: the values of a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

from corral.deploy.transfer.courier import HERE
from corral.deploy.transfer.courier_events import CourierRow


@dataclass(frozen=True)
class Origin:
    """Where a folder comes from: a folder here or on a host, or the hub, whose files are known beforehand."""

    path: str = ""
    host: str = HERE
    leave_out: tuple[str, ...] = ()
    links_out: str = "follow"  # links that lead out of the folder: follow (models), keep (environments)
    hub_url: str = ""
    hub_token: str | None = field(default=None, repr=False)
    files: tuple[CourierRow, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far one host is."""

    host: str
    what: str  # hashing, checking, receiving, done, failed, or a note
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of one host."""

    host: str
    state: str  # arrived, already (nothing was missing), shared (another host filled this storage), failed
    total_bytes: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    text: str = ""
    remedy: str = ""
    damaged: tuple[str, ...] = ()  # files that were there and wrong, and were fetched again
    exit_code: int = 0  # of the failure, as docs/exit-codes.md has them

    @property
    def ok(self) -> bool:
        return self.state != "failed"

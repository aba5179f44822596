"""Where a model is served: base URL, served name, and the file that holds the key.

Everything that uses a model knows only this, so it also works on servers Corral did not start. The key stays in its
file, or in memory: it is read when a request is made, and is in no field, repr or JSON of an endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from corral.base.errors import CorralError, UsageError
from corral.base.files import is_key, read_key


@dataclass(frozen=True)
class Endpoint:
    """One served model; `base_url` may end in /v1 or not."""

    base_url: str
    model: str
    key_file: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{self.base_url!r} is not the address of a server.", "Give http://HOST:PORT or https://HOST."
            )
        if parts.username or parts.password:
            raise UsageError("the address contains a user name or password.", "Put the key into a file: --key-file.")

    @property
    def root(self) -> str:
        """The URL without a trailing /v1: what paths such as /health and /v1/models are appended to."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def has_key(self) -> bool:
        return self.key_file is not None

    def key(self) -> str | None:
        """The key, read now; None when the endpoint needs none."""
        return None if self.key_file is None else read_key(self.key_file, shortest=1)


class HeldKeyEndpoint(Endpoint):
    """An endpoint whose key is held in memory instead of in a file."""

    def __init__(self, base_url: str, model: str, key: str | None) -> None:
        super().__init__(base_url, model, None)
        if key is not None and not is_key(key):
            raise UsageError(
                "the key contains characters that a key cannot have.", "Give the key alone, without quotes or spaces."
            )
        object.__setattr__(self, "_held", key)

    @property
    def has_key(self) -> bool:
        return self.key() is not None

    def key(self) -> str | None:
        held: str | None = self.__dict__["_held"]
        return held


@dataclass(frozen=True)
class Absence:
    """Why a server is away, for people; and whether waiting for it is of any use."""

    text: str  # which server, and why it is away
    remedy: str = ""
    ending: CorralError | None = None  # it has ended: it comes back only if it is started again
    stopped: bool = False  # … because it was stopped


class ModelServer(Protocol):
    """A server that a long job uses: its endpoint now, and after it moved."""

    name: str

    def find(self) -> Endpoint | None:
        """The endpoint, or None while there is none."""

    def absence(self) -> Absence:
        """Why it does not answer."""

    def seats(self) -> int | None:
        """How many requests its engines run at once by their plan, if known."""


class FixedServer:
    """A server that stays where it is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.name, self._endpoint = endpoint.root, endpoint

    def find(self) -> Endpoint:
        return self._endpoint

    def absence(self) -> Absence:
        return Absence(f"{self.name} does not answer", "Is the server running, and is this its address?")

    def seats(self) -> None:
        return None

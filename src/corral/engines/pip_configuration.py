"""Where this machine's pip looks for packages, so that the engine's installer looks there too.

Clusters and companies set mirrors, wheel folders and certificates in pip's configuration; a tool that ignores it
fails where pip works. Read through `pip config list`, the only documented way.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass

from corral.base.errors import CorralError
from corral.base.shell import run


@dataclass(frozen=True)
class Sources:
    """Indexes, wheel folders and trust, as pip would use them."""

    index: str = ""
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    certificate: str = ""
    no_index: bool = False

    def as_arguments(self) -> list[str]:
        """What `uv pip install` takes as arguments only."""
        return ["--no-index"] if self.no_index else []

    def as_environment(self) -> dict[str, str]:
        """The rest, for uv's environment: an address may hold a password, and everybody sees arguments."""
        found = {
            "UV_DEFAULT_INDEX": self.index,
            "UV_INDEX": " ".join(self.extra_indexes),
            "UV_FIND_LINKS": ",".join(self.find_links),
            "UV_INSECURE_HOST": " ".join(self.trusted_hosts),
            "SSL_CERT_FILE": self.certificate,
        }
        return {name: value for name, value in found.items() if value}


def parse_sources(listing: str) -> Sources:
    """Read the output of `pip config list`; a more specific section wins over `global`, the environment over all."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, separator, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        if not separator or section not in rank:
            continue
        try:
            value = str(ast.literal_eval(quoted))
        except (ValueError, SyntaxError):
            continue
        if rank[section] >= found.get(key, (-1, ""))[0]:
            found[key] = (rank[section], value)
    values = {key: value for key, (_, value) in found.items()}
    return Sources(
        index=values.get("index-url", ""),
        extra_indexes=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        certificate=values.get("cert", ""),
        no_index=values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
    )


@functools.cache
def read_sources() -> Sources:
    """pip's configuration on this machine; empty where pip is absent."""
    try:
        done = run([sys.executable, "-m", "pip", "config", "list"], timeout_s=30)
    except CorralError:
        return Sources()
    return parse_sources(done.stdout) if done.code == 0 else Sources()

"""What makes an ssh target: its options, and its table in a profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from corral.base.errors import UsageError
from corral.base.ssh import check_host
from corral.deploy.targets.keys import a_path, key
from corral.deploy.targets.keys import hosts as good_hosts


@dataclass(frozen=True)
class SshOptions:
    """What makes an ssh target."""

    hosts: tuple[str, ...]  # as ssh knows them, head first
    interface: str | None = None  # found, unless named
    hca: str | None = None
    home: str | None = None  # Corral's home on the nodes
    models: str | None = None  # a folder of models there
    hf_home: str | None = None  # a Hugging Face home there
    gpus: str | None = None  # hardware of one node by name, so that a dry run need not ask: 8xH100
    fabric: str | None = None  # kind of network between the nodes, for the plan: ib-ndr, ethernet-100, …
    env: dict[str, str] = field(default_factory=dict)  # network variables that the user fixes
    identity: str | None = None  # ssh -i; kept with the deployment, as all of these
    config: str | None = None  # ssh -F

    def __post_init__(self) -> None:
        for what, path in (("the key file", self.identity), ("the ssh configuration", self.config)):
            if path and not Path(path).is_file():
                raise UsageError(f"{what} {path!r} is not there.", "Correct [ssh] in the profile.")
        if not self.hosts:
            raise UsageError("no host was given.", "Name them: --hosts node00,node01.")
        for host in self.hosts:
            check_host(host)
        doubled = sorted({host for host in self.hosts if self.hosts.count(host) > 1})
        if doubled:
            raise UsageError(f"the host {doubled[0]!r} is named twice.", "Name each node once.")


@dataclass(frozen=True)
class SshKeys:
    """[ssh]: nodes reached by ssh."""

    hosts: tuple[str, ...] = key("the nodes, head first, as ssh knows them", (), good_hosts, ["node00", "node01"])
    hosts_file: str | None = key(
        "a file with one host per line instead; relative to the profile", None, None, "hosts.txt"
    )
    identity: str | None = key("`ssh -i`: the key file", None, a_path, "~/.ssh/cluster_key")
    config: str | None = key("`ssh -F`: a configuration of its own", None, a_path, "~/.ssh/config.d/cluster")

"""The docker runtime: vLLM in a container that a Docker daemon runs.

Without rootless Docker the container's processes get the user's own number, so that files they write are the user's;
with it, the user is root inside already.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.engines.runtimes.container import ContainerRuntime

USER_LINE = """\
case $("$client" info --format "{{.SecurityOptions}}" 2>/dev/null) in
    *rootless*) set -- --user 0:0 "$@" ;;
    *) set -- --user "$(id -u):$(id -g)" "$@" ;;
esac
"""


@dataclass(frozen=True)
class DockerRuntime(ContainerRuntime):
    """A rank in a Docker container."""

    name: str = "docker"

    def gpu_words(self, gpus: str) -> list[str]:
        return ["--gpus", gpus if gpus == "all" else f'"device={gpus}"']

    def lock_words(self) -> list[str]:
        return ["--cap-add=IPC_LOCK", "--ulimit", "memlock=-1"]

    def user_line(self) -> str:
        return USER_LINE

    def init_line(self) -> str:
        return 'set -- --init "$@"\n'

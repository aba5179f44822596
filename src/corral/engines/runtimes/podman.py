"""The podman runtime: vLLM in a container without a daemon.

Rootless Podman maps root inside to the user outside, so root inside is right for files, and so it is for root's own.
GPUs come through CDI (`nvidia-ctk cdi generate`), and limits are the user's own: rootless Podman may not raise them.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.engines.runtimes.container import ContainerRuntime, default_image

# its first process is a package of its own, which many machines lack
INIT_LINE = """\
for helper in /usr/libexec/podman/catatonit /usr/lib/podman/catatonit /usr/bin/catatonit; do
    if [ -x "$helper" ]; then set -- --init --init-path "$helper" "$@"; break; fi
done
"""


@dataclass(frozen=True)
class PodmanRuntime(ContainerRuntime):
    """A rank in a Podman container."""

    name: str = "podman"

    @property
    def image(self) -> str:
        return self.options.image or default_image(self.node, "docker.io/")  # it asks back for shorter names

    def gpu_words(self, gpus: str) -> list[str]:
        return [word for gpu in gpus.split(",") for word in ("--device", f"nvidia.com/gpu={gpu}")]

    def lock_words(self) -> list[str]:
        return ["--cap-add=IPC_LOCK", "--ulimit=host"]

    def user_line(self) -> str:
        return 'set -- --user 0:0 "$@"\n'

    def group_line(self) -> str:
        return 'set -- --group-add keep-groups "$@"\n'  # rootless Podman maps no other groups

    def init_line(self) -> str:
        return INIT_LINE

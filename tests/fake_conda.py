"""A stand-in for conda, whose environments are virtual ones.

The real one cannot be had from the package registries that tests may use.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from corral.engines import conda, environments
from corral.engines.locks import Sources

__all__ = ["make_conda"]

CONDA = f"""#!/bin/bash
# a stand-in for conda: environments are virtual ones, in $CONDA_HOME/envs
echo "$*" >>"$CONDA_HOME/said"
case "$1 $2" in
    "env list") printf '{{"envs": ["%s"' "$CONDA_HOME"; for e in "$CONDA_HOME"/envs/*/; do
        [ ! -d "$e" ] || printf ', "%s"' "${{e%/}}"; done; echo "]}}" ;;
    "create --yes") [ ! -e "$CONDA_HOME/broken" ] || {{ echo "CondaHTTPError: no channel" >&2; exit 1; }}
        place=$5; [ "$4" = --prefix ] || place=$CONDA_HOME/envs/$5
        {sys.executable} -m venv --without-pip "$place" ;;
    "shell.bash hook") cat <<HOOK
conda() {{ [ "\\$1" = activate ] || return 2
    local place=$CONDA_HOME/envs/\\$2
    [ -x "\\$place/bin/python" ] || {{ echo "EnvironmentNameNotFound: \\$2" >&2; return 1; }}
    export PATH="\\$place/bin:\\$PATH" CONDA_PREFIX="\\$place"; }}
HOOK
    ;;
esac
"""


def make_conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with conda, and an engine of one tiny package."""
    home = tmp_path / "conda"
    home.mkdir()
    (home / "conda").write_text(CONDA)
    (home / "conda").chmod(0o755)
    wheel = tmp_path / "wheels" / "vllm-0.32.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/__init__.py", "__version__ = '0.32.0'\n")
        about = "vllm-0.32.0.dist-info"
        packed.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
        packed.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{about}/RECORD", "")
    lock = f"vllm==0.32.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    sources = Sources(find_links=(str(wheel.parent),), no_index=True)
    monkeypatch.setattr(conda, "lock_text", lambda *_: lock)
    monkeypatch.setattr(environments, "read_sources", lambda: sources)
    monkeypatch.setenv("CONDA_HOME", str(home))
    monkeypatch.setenv("CONDA_EXE", str(home / "conda"))
    return home

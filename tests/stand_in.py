"""A stand-in engine in the place of an installed one, so that whole commands run in a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from corral.base.files import write_atomic
from corral.base.record import dump_json
from corral.engines import environments as engines

__all__ = ["install_stand_in"]


def install_stand_in(home: Path, script: Path, python: str = sys.executable, source: Path | None = None) -> None:
    """Make `script` the CPU engine of a Corral home; `source` is where it finds packages besides its Python's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORRAL_HOME", str(home))
        engine = engines.expected("cpu")
    program = Path(engine.path) / "bin" / "python"
    program.parent.mkdir(parents=True)
    path = f'export PYTHONPATH="{source}:$PYTHONPATH"\n' if source else ""
    program.write_text(f'#!/bin/sh\n{path}exec "{python}" "{script}" "$@"\n')
    program.chmod(0o755)
    write_atomic(Path(engine.path) / "engine.json", dump_json(engine))

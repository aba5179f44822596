"""The tutorial notebook, executed against the embedded default."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.conftest import ROOT
from tests.integration.conftest import Corral, free_port


def test_the_tutorial_runs(corral: Corral, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CORRAL_HOME"):
        monkeypatch.setenv(name, corral.env[name])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(ROOT / "notebooks" / "tutorial.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "save it without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    corral.run("up", "smollm2", "--name", "tutorial", "--port", free_port())  # the notebook reuses it
    try:
        client.execute()
        assert corral.json("status", "tutorial")["state"] == "stopped"  # its last cell stops what it used
    finally:
        corral.run("down", "tutorial", check=False)
        if kept := os.environ.get("CORRAL_KEEP_TUTORIAL"):
            nbformat.write(notebook, kept)
    pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 6

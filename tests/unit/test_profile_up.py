"""A deployment brought up by the name of a profile, with the stand-in engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from corral.deploy.lifecycle.decision import DeployRequest
from corral.deploy.lifecycle.rendering import dry_run
from corral.deploy.profile.merging import merged
from corral.deploy.profile.profile import load_profile
from tests.unit.conftest import Corral
from tests.until import free_port


def test_a_profile_is_enough_to_bring_a_model_up(corral: Corral, clean_home: Path, tmp_path: Path) -> None:
    mine = clean_home / ".config" / "corral" / "profiles" / "box.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text(f'[storage]\nmodels = "{corral.model.parent}"\n[defaults]\ncontext = 128\nrestart = 1\n')
    project = tmp_path / ".corral" / "profiles" / "box.toml"
    project.parent.mkdir(parents=True)
    project.write_text(f'[defaults]\nmodel = "{corral.model.name}"\n[engine]\nenv = {{ SAID_BY = "project" }}\n')
    done = subprocess.run(
        [sys.executable, "-m", "corral", "up", "--on", "box", "--name", "boxed", "--no-wait",
         "--port", str(free_port())],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"note: profile box: {project} over {mine}" in done.stderr
    assert corral("wait", "boxed").code == 0
    status = corral.wait_state("boxed", "ready")
    assert status["model"] == corral.model.name
    assert corral("down", "boxed").code == 0


def test_what_a_profile_gets_wrong_is_said_before_anything_starts(corral: Corral, clean_home: Path) -> None:
    mine = clean_home / ".config" / "corral" / "profiles" / "box.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text('[engine]\nargs = ["--swap-space", "16"]\n')
    done = corral("up", str(corral.model), "--on", "box")
    assert done.code == 7
    assert "--swap-space" in done.err
    assert corral("ps", "--json").json() == []


def test_a_jobs_name_and_its_logs_are_the_profiles(clean_home: Path) -> None:
    folder = Path.home() / ".config" / "corral" / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    own = 'job_name = "llama"\noutput = "/logs/%x.%j.out"\nerror = "/logs/%x.%j.err"\ntime = "4:00:00"\n'
    (folder / "logged.toml").write_text(f'target = "slurm"\n[slurm]\n{own}[hardware]\ngpus = "4xH100"\n')
    request = DeployRequest.of(merged(load_profile("logged", {}), {"model": "llama-3.1-8b"}))
    lines = dry_run(request)[1].script.splitlines()
    assert {"#SBATCH --job-name=llama", "#SBATCH --output=/logs/%x.%j.out", "#SBATCH --error=/logs/%x.%j.err"} <= {
        *lines
    }

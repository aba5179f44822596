"""`--link ray`: Ray is asked for first, refused before anything starts, and installed where that was asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.errors import EngineError, UsageError
from corral.deploy.launch.links import Node
from corral.deploy.lifecycle.decision import DeployRequest, decide
from corral.deploy.targets.slurm import SlurmTarget
from corral.engines import PINNED_VERSION
from corral.engines.runtimes.base import EngineCommand, NodeCheck, NodeSide, Runtime, make_runtime
from corral.engines.runtimes.conda import INSTALL
from corral.engines.runtimes.ray import QUESTION, REQUIREMENT, ray_checks
from tests.unit.test_bringup import Elsewhere

SIDE = NodeSide("/home/corral", "cuda", PINNED_VERSION)
OPTIONS: dict[str, dict[str, object]] = {
    "docker": {},
    "podman": {},
    "apptainer": {},
    "conda": {"env": "vllm-inference"},
    "venv": {"path": "/opt/vllm"},
    "module": {"load": ["python"], "inside": "conda", "options": {"env": "vllm-inference"}},
    "managed": {},
}


def made(name: str, **more: object) -> Runtime:
    return make_runtime(name, {**OPTIONS[name], **more}, SIDE)


def asked(folder: Path, version: str | None) -> subprocess.CompletedProcess[str]:
    """The question, put to a Python with that Ray."""
    if version is not None:
        info = folder / f"ray-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")
    code = (
        f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(folder)!r}]\n{QUESTION}"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [
        (None, 1, "Ray is not installed"),
        ("2.9.3", 1, "Ray 2.9.3 is older than 2.48.0"),
        ("2.48.0", 0, "2.48.0"),
        ("2.60.0", 0, "2.60.0"),
        ("3.0.0rc1", 0, "3.0.0rc1"),
    ],
)
def test_the_question(tmp_path: Path, version: str | None, code: int, words: str) -> None:
    done = asked(tmp_path, version)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_runtime_can_be_asked_and_has_a_remedy(name: str) -> None:
    (check,) = ray_checks(made(name))
    assert QUESTION in check.argv
    assert "Leave --link out" in check.remedy
    assert check.reports == "ray"


class TwoNodes(Elsewhere):
    def nodes(self) -> tuple[Node, ...]:
        return (Node("a", "10.0.0.1"), Node("b", "10.0.0.2"))


def request(link: str, runtime: str, **options: object) -> DeployRequest:
    return DeployRequest(
        model="llama-3.1-405b-instruct", link=link, runtime=runtime, runtime_options={**OPTIONS[runtime], **options}
    )


@pytest.mark.parametrize("runtime", ["docker", "podman", "apptainer"])
def test_vllms_own_image_is_refused_before_anything_starts(runtime: str) -> None:
    with pytest.raises(EngineError, match=r"vllm/vllm-openai:v0.32.0 has no Ray, which --link ray needs"):
        decide(request("ray", runtime), TwoNodes("8xH100x2"))
    decide(request("native", runtime), TwoNodes("8xH100x2"))
    decide(request("auto", runtime), TwoNodes("8xH100x2"))


def test_images_that_may_have_it_are_asked() -> None:
    for image in ("vllm/vllm-openai:v0.10.2", "registry/mine:latest"):
        decide(request("ray", "docker", image=image), TwoNodes("8xH100x2"))
    decide(request("ray", "docker", ray="install"), TwoNodes("8xH100x2"))
    decide(request("ray", "conda"), TwoNodes("8xH100x2"))


def test_an_unknown_word_for_ray() -> None:
    for name in ("docker", "conda"):
        with pytest.raises(UsageError, match="ray cannot be 'yes'"):
            made(name, ray="yes")
    with pytest.raises(UsageError):
        made("apptainer", ray="install")


STUB = """\
#!/bin/sh
echo "$@" >>"$0.calls"
case $1 in
image) [ -e "$0.built" ] ;;
build) cat >"$0.dockerfile"; touch "$0.built" ;;
esac
"""


def test_an_image_with_ray_is_derived_once_on_a_node(tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text(STUB)
    client.chmod(0o755)
    runtime = made("docker", ray="install", program=str(client))
    (check,) = [c for c in runtime.check() if "derived from" in c.what]
    for _ in range(2):
        assert subprocess.run(check.argv).returncode == 0
    lines = Path(f"{client}.dockerfile").read_text().splitlines()
    assert lines[0] == "FROM vllm/vllm-openai:v0.32.0"
    assert len(lines) == 2
    assert lines[1].startswith(f'RUN uv pip install --system "{REQUIREMENT}" || ')
    calls = Path(f"{client}.calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["image", "build", "image"]
    job = EngineCommand("d", "l", 0, ("vllm", "serve", "m"), {}, "/w")
    (image,) = [word for word in runtime.wrap(job).argv if word.startswith("corral-with-ray:")]
    assert image in calls[1]
    assert image in ray_checks(runtime)[0].argv
    assert runtime.flags().complete  # of the image that it comes from
    assert not any("derived" in c.what for c in made("docker").check())


@pytest.mark.parametrize(("own", "code"), [(True, 0), (False, 1)])
def test_ray_goes_only_into_an_environment_of_ones_own(tmp_path: Path, own: bool, code: int) -> None:
    prefix = tmp_path / "env" if own or os.getuid() == 0 else Path("/proc")
    (tmp_path / "env").mkdir()
    if not own and os.getuid() == 0:
        os.chown(prefix, 4321, 4321)
    python = tmp_path / "python"
    cases = f'*sys.prefix*) echo {prefix} ;; *"import ray"*) exit 1 ;; *) echo "$@" >{tmp_path}/said ;;'
    python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", INSTALL, "corral-ray", REQUIREMENT],
        capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == code
    if own:
        assert REQUIREMENT in (tmp_path / "said").read_text()
    else:
        assert "is not yours" in done.stderr
    assert any("Ray in the conda environment" in c.what for c in made("conda", ray="install").check())


def test_slurm_asks_the_shared_environment_before_it_queues(tmp_path: Path) -> None:
    target = object.__new__(SlurmTarget)  # `verify` needs nothing of a cluster

    def check(code: int, words: str) -> NodeCheck:
        (plain,) = ray_checks(made("conda"))
        return NodeCheck(
            plain.what, ("sh", "-c", f"echo '{words}' >&2; exit {code}"), plain.remedy, details=plain.details
        )

    with pytest.raises(EngineError, match="Ray for --link ray: Ray is not installed"):
        target.verify([check(1, "Ray is not installed")])
    target.verify([check(0, "2.60.0"), check(127, "there is no command conda on this node")])  # the nodes may have it
    target.verify(ray_checks(made("apptainer")))  # images are the nodes' own business

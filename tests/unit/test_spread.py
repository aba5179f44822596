"""Spreading over simulated hosts: a fake ssh, folders as hosts, real couriers on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import ConflictError, CorralError, DataError, UsageError
from corral.base.ssh import Ssh
from corral.deploy.transfer.courier import ChangedSourceError
from corral.deploy.transfer.courier_events import CourierRow
from corral.deploy.transfer.courier_group import Origin, Outcome, Progress
from corral.deploy.transfer.spread import ensure_folder, plan_sources, same_storage, spread
from tests.fake_ssh import make_fake_ssh

HOSTS = ["n0", "n1", "n2", "n3"]
names = st.lists(st.text("abcdefgh0123", min_size=1, max_size=3), unique=True, max_size=20)


# ------------------------------------------------------------------------------------------------ deciding
@given(names, st.integers(0, 20), st.randoms(use_true_random=False))
def test_the_plan_is_a_set_of_chains(hosts: list[str], cut: int, random: object) -> None:
    heads, receivers = hosts[:cut], hosts[cut:]
    have = {host: len(host) * 7 % 5 for host in hosts}
    plan = plan_sources(receivers, have, heads)
    assert set(plan) == set(receivers)
    first_choices = [asked[0] for asked in plan.values() if asked]
    assert len(first_choices) == len(set(first_choices)), "nobody's uplink carries the folder twice"
    for host, asked in plan.items():
        assert host not in asked
        assert len(set(asked)) == len(asked)
        for other in asked:
            assert other in heads or host not in plan[other], "no two can wait for each other"
        if heads:
            assert set(heads) <= set(asked), "somebody who has everything can always be asked"
            assert have[host] <= min((have[other] for other in asked if other not in heads), default=99)
    if not heads and receivers:
        assert [len(asked) for asked in plan.values()].count(0) == 1, "exactly one is pushed to"


@given(names.filter(bool), st.integers(1, 4))
def test_chains_are_equally_long(hosts: list[str], head_count: int) -> None:
    heads = [f"HEAD{number}" for number in range(head_count)]
    plan = plan_sources(hosts, {}, heads)
    depths = [next(place for place, other in enumerate(asked) if other in heads) + 1 for asked in plan.values()]
    assert max(depths) == -(-len(hosts) // head_count)


def test_sixteen_nodes_take_about_as_long_as_one() -> None:
    """Each uplink sends one block per tick to one receiver; a node may send what it had before the tick."""
    hosts, blocks = [f"n{number}" for number in range(16)], 400
    plan = plan_sources(hosts, {}, ["source"])
    have = {"source": blocks, **dict.fromkeys(hosts, 0)}
    ticks = 0
    while any(have[host] < blocks for host in hosts):
        before, ticks = dict(have), ticks + 1
        for host in hosts:
            have[host] += before[plan[host][0]] > before[host]
    assert ticks == blocks + 15


@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=6))
def test_hosts_that_see_one_storage_are_one_group(groups: list[set[int]]) -> None:
    seen = {f"g{number}h{host}": [f"g{number}h{other}" for other in group]
            for number, group in enumerate(groups) for host in sorted(group)}  # fmt: skip
    found = same_storage(seen)
    assert sorted(map(sorted, found)) == sorted(
        sorted(f"g{number}h{host}" for host in group) for number, group in enumerate(groups)
    )


def test_one_glance_is_enough_for_a_group() -> None:
    assert same_storage({"a": ["a"], "b": ["b", "a"], "c": ["c"]}) == [("a", "b"), ("c",)]


# ------------------------------------------------------------------------------------------------ doing
@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORRAL_SSH", make_fake_ssh(tmp_path / "hosts", HOSTS))
    return tmp_path / "hosts"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for number in (1, 2, 3):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(4_000_000 + number))
    for number in range(30):
        (folder / f"small-{number}").write_bytes(os.urandom(500))
    return folder


def to_hosts(
    source: Origin,
    destination: str = "~/model",
    report: Callable[[Progress], None] = lambda step: None,
    **more: object,
) -> dict[str, Outcome]:
    return spread(Ssh(), HOSTS, source, destination, {}, report, **more)  # type: ignore[arg-type]


def same(one: Path, other: Path) -> bool:
    listed = [sorted(path.name for path in folder.iterdir() if path.name[0] != ".") for folder in (one, other)]
    return listed[0] == listed[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in listed[0]
    )


def nothing_left_over(hosts: Path) -> bool:
    pids = [int(word) for file in hosts.glob("*/pids") for word in file.read_text().split()]
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def running(host: Path, command: str) -> int:
    """The process of a host's courier."""
    for word in (host / "pids").read_text().split():
        line = Path(f"/proc/{word}/cmdline")
        if line.exists() and line.read_bytes().endswith(f"\0{command}\0".encode()):
            return int(word)
    raise AssertionError(f"no {command} runs on {host.name}")


def states(outcomes: dict[str, Outcome]) -> list[str]:
    return [outcome.state for outcome in outcomes.values()]


def test_from_this_machine(hosts: Path, model: Path) -> None:
    assert states(to_hosts(Origin(str(model)))) == ["arrived"] * 4
    assert all(same(model, hosts / host / "model") for host in HOSTS)
    assert nothing_left_over(hosts)
    assert states(to_hosts(Origin(str(model)))) == ["already"] * 4


def test_from_a_host_that_is_one_of_them(hosts: Path, model: Path) -> None:
    shutil.copytree(model, hosts / "n2" / "model")
    outcomes = to_hosts(Origin("~/model", host="n2"))
    assert states(outcomes) == ["arrived", "arrived", "already", "arrived"]
    assert all(same(model, hosts / host / "model") for host in HOSTS)


def test_only_what_is_damaged_moves(hosts: Path, model: Path) -> None:
    to_hosts(Origin(str(model)))
    with (hosts / "n1" / "model" / "model-2.safetensors").open("r+b") as file:
        file.write(b"\0\0\0")
    os.truncate(hosts / "n3" / "model" / "model-3.safetensors", 17)
    outcomes = to_hosts(Origin(str(model)))
    assert states(outcomes) == ["already", "arrived", "already", "arrived"]
    assert outcomes["n1"].damaged == ("model-2.safetensors",)
    assert outcomes["n1"].moved_bytes == 4_000_002
    assert outcomes["n3"].moved_bytes == 4_000_003
    assert all(same(model, hosts / host / "model") for host in HOSTS)


@pytest.mark.parametrize("victim", ["n0", "n2"])
@pytest.mark.parametrize("here", [True, False])
def test_a_host_lost_in_the_middle_is_named_and_the_others_complete(
    hosts: Path, model: Path, victim: str, here: bool
) -> None:
    if not here:
        shutil.copytree(model, hosts / "n3" / "source")
    killed = threading.Event()

    def report(step: Progress) -> None:
        if step.host == victim and step.what == "receiving" and step.done_bytes > 20_000 and not killed.is_set():
            killed.set()
            os.kill(running(hosts / victim, "fetch"), signal.SIGKILL)

    source = Origin(str(model)) if here else Origin("~/source", host="n3")
    outcomes = to_hosts(source, report=report, uplink_bytes_per_s=8e6)
    assert [host for host in HOSTS if not outcomes[host].ok] == [victim]
    assert outcomes[victim].text.startswith("lost")
    assert outcomes[victim].exit_code == 9
    others = [host for host in HOSTS if host != victim]
    assert all(same(model, hosts / host / "model") for host in others)
    again = to_hosts(source)
    assert all(outcome.ok for outcome in again.values())
    assert same(model, hosts / victim / "model")
    assert nothing_left_over(hosts)


def test_a_source_lost_in_the_middle_is_named_and_a_rerun_continues(hosts: Path, model: Path) -> None:
    shutil.copytree(model, hosts / "n3" / "source")
    killed = threading.Event()

    def report(step: Progress) -> None:
        if step.what == "receiving" and step.done_bytes > 20_000 and not killed.is_set():
            killed.set()
            os.kill(running(hosts / "n3", "serve"), signal.SIGKILL)

    source = Origin("~/source", host="n3")
    outcomes = to_hosts(source, report=report, uplink_bytes_per_s=8e6)
    assert states(outcomes) == ["failed"] * 4
    assert outcomes["n1"].text.startswith("n3: lost")
    assert outcomes["n1"].exit_code == 9
    again = to_hosts(source)
    assert states(again) == ["arrived"] * 4
    assert again["n0"].moved_bytes < 12_000_000, "it began again"
    assert all(same(model, hosts / host / "model") for host in HOSTS)


def test_a_host_that_is_down_is_named(hosts: Path, model: Path) -> None:
    (hosts / "n1" / "down").touch()
    outcomes = to_hosts(Origin(str(model)))
    assert states(outcomes) == ["arrived", "failed", "arrived", "arrived"]
    assert "n1 cannot be reached" in outcomes["n1"].text


def test_a_source_without_the_folder_is_an_error(hosts: Path) -> None:
    with pytest.raises(CorralError, match="n1: there is no folder"):
        to_hosts(Origin("~/nothing", host="n1"))
    assert nothing_left_over(hosts)


def test_shared_storage_is_filled_once(hosts: Path, model: Path, tmp_path: Path) -> None:
    for host in ("n0", "n1", "n2"):
        (tmp_path / "shared").mkdir(exist_ok=True)
        (hosts / host / "disk").symlink_to(tmp_path / "shared")
    outcomes = to_hosts(Origin(str(model)), "~/disk")
    assert states(outcomes) == ["arrived", "shared", "shared", "arrived"]
    assert same(model, tmp_path / "shared")
    assert same(model, hosts / "n3" / "disk")
    with pytest.raises(UsageError, match="not the storage that n3 sees"):
        to_hosts(Origin(str(model)), "~/disk", storage="shared")
    with pytest.raises(UsageError, match="the same storage on n0, n1, n2"):
        to_hosts(Origin(str(model)), "~/disk", storage="own")


def test_another_model_is_not_overwritten(hosts: Path, model: Path) -> None:
    (hosts / "n1" / "model").mkdir()
    (hosts / "n1" / "model" / "config.json").write_text('{"another": "model"}')
    with pytest.raises(ConflictError, match="on n1 holds another model"):
        to_hosts(Origin(str(model)))
    assert not (hosts / "n0" / "model" / "config.json").exists()
    with pytest.raises(ConflictError) as caught:
        ensure_folder(Ssh(), HOSTS, model, "~/model", {}, lambda *_: None)
    assert "home in [storage]" in caught.value.remedy
    assert "--to" not in caught.value.remedy, "`corral up` has no such option"


@pytest.mark.parametrize("here", [True, False])
def test_a_source_that_changes_ends_it_for_all_and_is_told_once(hosts: Path, model: Path, here: bool) -> None:
    source, folder, said = Origin(str(model)), model, list[str]()
    if not here:
        shutil.copytree(model, hosts / "n3" / "source")
        source, folder = Origin("~/source", host="n3"), hosts / "n3" / "source"
    changed = threading.Event()

    def report(step: Progress) -> None:
        said.append(step.what)
        if step.what == "receiving" and step.done_bytes > 20_000 and not changed.is_set():
            changed.set()
            with (folder / "model-3.safetensors").open("ab") as file:
                file.write(b"more")

    with pytest.raises(ChangedSourceError, match=r"model-3.safetensors had 4,000,003 bytes and has 4,000,007\."):
        to_hosts(source, report=report, uplink_bytes_per_s=2e6)
    assert not [what for what in said if "damaged" in what or "failed" in what]
    assert not list(hosts.glob("*/model/.model-3*.corral-part"))
    assert nothing_left_over(hosts)
    assert all(outcome.ok for outcome in to_hosts(source).values())
    assert all(same(folder, hosts / host / "model") for host in HOSTS)
    assert not list(hosts.glob("*/model/*.corral-part"))


def test_a_full_disk_is_told_with_numbers_before_anything_moves(hosts: Path) -> None:
    rows = [CourierRow("huge.safetensors", "file", 1 << 50, sha256="0" * 64)]
    with pytest.raises(DataError, match=r"n0 needs 1125899.91 GB and has [\d.]+ GB free"):
        to_hosts(Origin(hub_url="http://127.0.0.1:9", files=tuple(rows)))


def test_ensure_folder_moves_an_environment_once(hosts: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib").mkdir()
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (venv / "bin" / "python").symlink_to("/usr/bin/python3")
    (venv / "lib64").symlink_to("lib")
    for number in range(700):
        (venv / "lib" / f"m{number}.py").write_text(f"x = {number}\n")
    os.utime(venv / "lib" / "m3.py", ns=(10**18, 10**18))
    seen: list[tuple[str, int, int]] = []
    for _ in range(2):
        assert ensure_folder(Ssh(), HOSTS, venv, "~/venv", {}, lambda *step: seen.append(step)) == "~/venv"
    copy = hosts / "n3" / "venv"
    assert str((copy / "bin" / "python").readlink()) == "/usr/bin/python3"
    assert str((copy / "lib64").readlink()) == "lib"
    assert (copy / "lib" / "m3.py").stat().st_mtime_ns == 10**18
    assert len(list((copy / "lib").iterdir())) == 700
    assert any("already there" in text for text, _, _ in seen)


def test_ensure_folder_hashes_nothing_when_all_is_there(hosts: Path, model: Path) -> None:
    for host in HOSTS:
        shutil.copytree(model, hosts / host / "model")
    seen: list[str] = []
    ensure_folder(Ssh(), HOSTS, model, "~/model", {}, lambda text, done, total: seen.append(text))
    assert not any("hashing" in text or "checking" in text for text in seen)


def test_ensure_folder_names_the_hosts_that_failed(hosts: Path, model: Path) -> None:
    (hosts / "n1" / "down").touch()
    with pytest.raises(CorralError, match="1 of 4 hosts: n1: n1 cannot be reached"):
        ensure_folder(Ssh(), HOSTS, model, "~/model", {}, lambda *_: None)
    assert same(model, hosts / "n3" / "model")

"""The Fleet view's answers: phases and when it is ready, rows read only when something happened, logs, starts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from corral.base.errors import NotFoundError, UsageError
from corral.base.processes import own_identity
from corral.console import statuses as standings
from corral.console.commands import Commands, RunningCommand
from corral.console.context import LatestValue
from corral.console.fleet import changes
from corral.console.logs import read_journal, read_log
from corral.console.starting import form_of, up_argv
from corral.console.statuses import DeploymentRows, Start, deployment_row, phases_of, ready_at_s, restart_argv
from corral.deploy.deployment.events import Event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.start_times import Expected, Phase
from corral.deploy.deployment.state import State
from corral.deploy.lifecycle.deployments import Record, Status
from corral.deploy.lifecycle.staging import Staging
from tests.console_home import make, submitted
from tests.unit.conftest import Silent
from tests.until import until

USUAL = {name: Expected(seconds, True) for name, seconds in (("starting", 8.0), ("loading", 20.0), ("warming", 6.0))}


def state(at_s: float, name: str) -> Event:
    return Event(at_s, "state", 0, at_s - 100, {"state": name})


def phase(at_s: float, name: str, **more: int) -> Event:
    return Event(at_s, "phase", 0, at_s - 100, {"phase": name, **more})


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORRAL_HOME", str(tmp_path / "home"))


def test_the_line_of_a_job_goes_from_its_queue_to_what_is_to_come() -> None:
    events = [state(160, "starting"), phase(168, "loading", done=5, total=20)]
    line = phases_of(Start(State.LOADING, events, USUAL, 100.0, 110.0))
    assert [(one.phase, one.since_s, one.until_s) for one in line] == [
        ("staging", 100.0, 110.0), ("queued", 110.0, 160.0), ("starting", 160.0, 168.0), ("loading", 168.0, None),
        ("warming", None, None), ("ready", None, None),
    ]  # fmt: skip
    assert (line[3].done, line[3].total) == (5, 20)


def test_ready_is_told_by_what_is_usual_and_by_how_far_it_is() -> None:
    events = [state(100, "starting"), phase(110, "loading")]
    line = phases_of(Start(State.LOADING, events, USUAL, 100.0))
    assert ready_at_s(line) == 110 + 20 + 6
    events.append(phase(120, "loading", done=10, total=40))  # a quarter in ten seconds
    assert ready_at_s(phases_of(Start(State.LOADING, events, USUAL, 100.0))) == 110 + 40 + 6
    queued = phases_of(Start(State.QUEUED, [], USUAL, 100.0, 101.0))
    assert ready_at_s(queued) is None  # nobody knows how long a queue is


def test_a_download_is_shown_with_its_share_and_its_end() -> None:
    staged = [phase(100.2, "installing engine"), phase(100.3, "fetching model")]
    staged += [phase(at_s, "fetching model", done=done, total=1000) for at_s, done in ((101, 600), (111, 700))]
    line = phases_of(Start(State.STAGING, [], USUAL, 100.0, staged=staged))
    assert [one.phase for one in line] == ["fetching model", "starting", "loading", "warming", "ready"]
    assert (line[0].done, line[0].total, line[0].until_s) == (700, 1000, None)
    assert line[0].ends_s == 111 + 30  # 600 were there already: only what came since tells its speed
    assert ready_at_s(line) == 141 + 8 + 20 + 6
    behind = phases_of(Start(State.STAGING, [], USUAL, 100.0, staged=staged, queues=True))
    assert [one.phase for one in behind][:2] == ["fetching model", "queued"]
    assert ready_at_s(behind) is None
    loading = [state(150, "starting"), phase(160, "loading")]
    later = phases_of(Start(State.LOADING, loading, USUAL, 100.0, staged=[*staged, phase(149, "starting")]))
    assert [(one.phase, one.until_s) for one in later][:3] == [
        ("fetching model", 150.0), ("starting", 160.0), ("loading", None)]  # fmt: skip


def test_whether_a_model_is_fetched_is_not_known_while_the_engine_is_installed() -> None:
    staged = [phase(100.2, "installing engine", done=1, total=10)]
    line = phases_of(Start(State.STAGING, [], {**USUAL, "installing engine": Expected(150.0)}, 100.0, staged=staged))
    assert line[0].expected_s == 150.0
    assert ready_at_s(line) is None


def test_a_failed_start_ends_where_it_failed() -> None:
    events = [state(100, "starting"), phase(110, "loading"), state(130, "failed")]
    line = phases_of(Start(State.FAILED, events, USUAL, 100.0))
    assert [one.phase for one in line] == ["starting", "loading", "failed"]
    assert line[1].until_s == 130


def test_a_row_has_what_a_card_needs_and_no_key() -> None:
    made = make("one", words=("up", "smollm2")).agent().course(("starting", 1), ("ready", 20))
    made.serves("http://127.0.0.1:8000/v1")
    _, row = deployment_row(made.folder)
    assert row is not None
    assert (row["state"], row["url"], row["stop"]) == ("ready", "http://127.0.0.1:8000/v1", "corral down one")
    assert row["restart"] == "corral up --name one smollm2"
    text = json.dumps(row)
    assert made.folder.key.read_text().strip() not in text
    assert str(made.folder.key) not in text


def test_a_card_shows_what_the_command_that_makes_it_does() -> None:
    made = make("one")
    staging = Staging(Silent(), made.folder, {"fetching model": Expected(40.0), "loading": Expected(9.0)})
    staging.phase(Phase.FETCHING)
    staging.detail("hub: model-00001", 250_000_000, 1_000_000_000)
    _, row = deployment_row(made.folder)
    assert row is not None
    assert (row["state"], row["phase"], row["done"], row["total"]) == (
        "staging",
        "fetching model",
        250_000_000,
        10**9,
    )
    now = next(one for one in row["phases"] if one["until_s"] is None)
    assert (now["phase"], now["expected_s"], now["text"]) == ("fetching model", 40.0, "hub: model-00001")
    assert read_journal(made.folder)[0]["details"]["done"] == 250_000_000


def test_of_two_events_in_one_millisecond_the_later_is_the_newer() -> None:
    made = make("one")
    for word in ("first", "second", "third"):
        made.event("note", 1.0, text=word)
    assert [one["details"]["text"] for one in read_journal(made.folder)] == ["third", "second", "first"]


def test_a_deployment_that_cannot_be_read_hides_no_other() -> None:
    make("fine").agent().course(("starting", 1))
    broken = make("broken")
    broken.folder.record.write_text("{")
    rows = asyncio.run(DeploymentRows().read())
    assert rows["d:fine"]["state"] == "starting"
    assert rows["d:broken"]["state"] == "unknown"
    assert "Delete" in rows["d:broken"]["remedy"]


def test_only_what_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [make(f"n{number}").agent().course(("starting", 1)) for number in range(3)]
    read: list[str] = []
    real = standings.deployment_row

    def counted(folder: DeploymentFolder, before: Status | None) -> object:
        read.append(folder.name)
        return real(folder, before)

    monkeypatch.setattr(standings, "deployment_row", counted)
    now = [0.0]
    looks = DeploymentRows(lambda: now[0])

    async def go() -> None:
        first = await looks.read()
        assert sorted(read) == ["n0", "n1", "n2"]
        read.clear()
        second = await looks.read()
        assert read == []
        assert changes(first, second) is None
        made[1].event("state", 5, state="loading")
        third = await looks.read()
        assert read == ["n1"]
        news = changes(second, third)
        assert news is not None
        assert [row["name"] for row in news["rows"]] == ["n1"]
        now[0] += standings.LIVING_S + 0.1  # one may have died without a word
        read.clear()
        fourth = await looks.read()
        assert sorted(read) == ["n0", "n1", "n2"]
        assert changes(third, fourth) is None  # they stand as before: the same objects

    asyncio.run(go())


def test_a_host_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    make("slow"), make("quick").agent().course(("starting", 1))
    release = threading.Event()
    real = standings.deployment_row

    def stuck(folder: DeploymentFolder, before: object) -> object:
        if folder.name == "slow":
            release.wait()
        return real(folder, None)

    monkeypatch.setattr(standings, "deployment_row", stuck)

    async def go() -> None:
        looks = DeploymentRows()
        rows = await looks.read()
        assert rows["d:quick"]["state"] == "starting"
        assert rows["d:slow"]["text"] == "…"
        assert rows["d:slow"]["phases"] == []  # the page draws it with no more than this
        release.set()

    asyncio.run(go())


def test_nothing_is_read_that_nobody_listens_to() -> None:
    looks = []

    async def read() -> int:
        looks.append(1)
        return len(looks)

    async def go() -> None:
        feed = LatestValue(read, every_s=0.01)
        await asyncio.sleep(0.05)
        assert looks == []
        one, other = feed.values(), feed.values()
        await anext(one)
        await anext(other)
        assert feed.listeners == 2
        await one.aclose()
        await anext(other)
        await other.aclose()
        assert feed.listeners == 0
        before = len(looks)
        await asyncio.sleep(0.05)
        assert len(looks) == before

    asyncio.run(go())


def test_how_it_is_started_again() -> None:
    def again(name: str, *words: str) -> list[str] | None:
        return restart_argv(Record(name, "x", "m", "m", "local", 0.0, own_identity(), words=words))

    assert again("n", "up", "m", "--name", "n") == ["up", "m", "--name", "n"]
    assert again("n", "up", "m", "--", "--name", "x") == ["up", "--name", "n", "m", "--", "--name", "x"]
    assert again("n") is None  # made by Python
    assert again("n~2", "up", "m") is None  # a successor: its chain starts it
    assert again("n", "up", "m", "--env", "HF_TOKEN=hf_x") is None  # the page would show it


def test_the_form_becomes_the_words_of_up() -> None:
    form = form_of({"model": "llama", "name": "a b", "context": "32k", "target": "slurm",
                    "options": {"--partition": "gpu", "--time": "8:00:00", "--account": ""}})  # fmt: skip
    assert up_argv(form) == [
        "up",
        "llama",
        "--name",
        "a b",
        "--context",
        "32k",
        "--time",
        "8:00:00",
        "--partition",
        "gpu",
    ]
    assert up_argv(form_of({})) == ["up"]
    form = form_of({"port": "8123", "settings": "weights=int4  tensor=2", "runtime": "docker", "flags": "--seed 1",
                    "runtime_options": "image='a b'"})  # fmt: skip
    words = [
        "--port",
        "8123",
        "--runtime",
        "docker",
        "--set",
        "weights=int4",
        "--set",
        "tensor=2",
        "--runtime-option",
    ]
    assert up_argv(form) == ["up", *words, "image=a b", "--", "--seed", "1"]


@pytest.mark.parametrize(
    "given",
    [{"model": "--help"}, {"name": "a\nb"}, {"goal": "fast"}, {"target": "moon"}, {"context": "long"}, {"other": "x"},
     {"options": {"--partition": "gpu"}}, {"options": []}, {"concurrency": "-1"},
     {"target": "slurm", "options": {"--partition": "--wrap=rm"}}, {"port": "x"}, {"port": "70000"},
     {"settings": "tensor"}, {"settings": "tensor=2 --on=x"}, {"runtime": "moon"}, {"flags": "'a"}],
)  # fmt: skip
def test_a_form_that_would_be_another_command_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        form_of(given)


def test_a_log_is_searched_followed_and_cleaned() -> None:
    made = make("one").log("first line", "\x1b[31mred\x1b[0m \x07bell", "<script>alert(1)</script>", "Second LINE")
    page = read_log(made.folder, 0)
    assert (
        page.lines == ("first line", "red bell", "<script>alert(1)</script>", "Second LINE") or "red" in page.lines[1]
    )
    assert "\x1b" not in "".join(page.lines)
    assert "\x07" not in "".join(page.lines)
    found = read_log(made.folder, 0, "line")
    assert (found.lines, found.found) == (("first line", "Second LINE"), 2)
    made.log("third")
    later = read_log(made.folder, 0, after=page.end)
    assert later.lines == ("third",)
    assert read_log(made.folder, 0, after=later.end).lines == ()
    with pytest.raises(NotFoundError):
        read_log(made.folder, 5)


def test_a_long_log_shows_its_end_in_whole_lines() -> None:
    made = make("one").log(*(f"line {number} {'x' * 90}" for number in range(9000)))
    page = read_log(made.folder, 0)
    assert page.lines[-1].startswith("line 8999 ")
    assert all(line.startswith("line ") for line in page.lines)
    assert len(page.lines) == 400
    assert read_log(made.folder, 0, "line 17 ").lines[0].startswith("line 17 ")


def test_the_journal_is_newest_first() -> None:
    made = make("one").course(("starting", 1), ("loading", 2), ("ready", 9))
    assert [one["details"]["state"] for one in read_journal(made.folder)] == ["ready", "loading", "starting"]


def ended(commands: Commands, id: str) -> RunningCommand:
    until(lambda: commands.read(id).exit_code is not None, "the command's end")
    return commands.read(id)


def test_a_command_outlives_nothing_it_should_not_and_shows_what_it_prints() -> None:
    commands = Commands(program=(sys.executable, "-c", "import sys; print('said', *sys.argv[1:])"))
    begun = commands.start(["down", "a b"])
    assert begun.line == "corral down 'a b'"
    over = ended(commands, begun.id)
    assert over.output == ("said down a b",)
    both = commands.start(["down", "x; rm"], ["up", "m"])
    assert both.line == "corral down 'x; rm' && corral up m"
    over = ended(commands, both.id)
    assert over.output == ("said down x; rm", "said up m")
    with pytest.raises(NotFoundError):
        commands.read("nothing")


def test_a_job_that_waits_has_its_submission_in_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.console_home import fake_program

    fake_program(tmp_path / "bin", "squeue", "echo '4821|PENDING|Priority|N/A|N/A|1:00:00||0|0:0|'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    from corral.deploy.slurm import commands as slurm

    slurm.forget_answers()
    made = submitted(make("queued", target="slurm", nodes=("rank0", "rank1")), "4821", 3.0)
    _, row = deployment_row(made.folder)
    slurm.forget_answers()
    assert row is not None
    assert row["state"] == "queued"
    assert "higher priority" in row["text"]
    assert [one["phase"] for one in row["phases"]][:2] == ["staging", "queued"]
    assert row["job"]["id"] == "4821"

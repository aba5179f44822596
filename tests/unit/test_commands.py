"""Whole commands with a stand-in engine: what a user types, reads, and gets as exit code."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from corral.base.processes import identify
from corral.cli import VERBS
from corral.engines import environments as engines
from corral.node.processes import marked, process_table
from tests.unit.conftest import Corral, Shellcheck
from tests.until import free_port, until


def launched(corral: Corral, name: str) -> set[int]:
    record = json.loads((corral.home / "corral" / "deployments" / name / "deployment.json").read_text())
    return marked(record["launch_id"])


def test_up_use_down(corral: Corral) -> None:
    """Each command in a process of its own, as a shell runs it; most other tests do without."""
    typed = corral.apart
    up = typed("up", str(corral.model), "--json")
    assert up.code == 0, up.err
    document = up.json()
    assert document["name"] == "tiny"
    assert document["state"] == "ready"
    assert document["endpoint"]["base_url"].startswith("http://127.0.0.1:")
    assert document["endpoint"]["model"] == "tiny"
    assert document["timings"]["engine_ready_s"] > 0
    key_file = Path(document["endpoint"]["key_file"])
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key = key_file.read_text().strip()

    ps = typed("ps")
    assert "tiny" in ps.out
    assert "ready" in ps.out
    assert typed("ps", "--json").json()[0]["state"] == "ready"
    status = typed("status", "tiny", "--json").json()
    assert status["observed"]["kv_tokens"] == 914304
    assert typed("wait", "tiny").out.strip() == document["endpoint"]["base_url"]
    assert "Starting to load model" in typed("logs", "tiny").out
    assert typed("logs", "tiny", "-n", "1", "--json").json()["rank"] == 0
    events = [json.loads(line) for line in typed("events", "tiny", "--json").out.splitlines()]
    assert [event["state"] for event in events if event["kind"] == "state"] == ["starting", "loading", "ready"]

    second = typed("up", str(corral.model))
    assert second.code == 4
    assert "already ready, started by process" in second.err

    assert len(launched(corral, "tiny")) >= 1
    down = typed("down", "tiny")
    assert down.code == 0
    assert not launched(corral, "tiny")
    assert typed("status", "tiny", "--json").json()["reason"] == "requested"
    assert typed("down", "tiny").out.strip() == "tiny: was not running"
    waited = typed("wait", "tiny")
    assert waited.code == 8
    assert "Starting" not in waited.err  # its start is not told again
    assert "`corral up` starts it again" in waited.err
    folder = corral.home / "corral" / "deployments" / "tiny"
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"others can read {path}"
        if path.is_file() and path.name != "key":
            assert key not in path.read_text(errors="replace"), f"the key is in {path}"


def test_a_name_can_be_left_out_where_only_one_is_meant(corral: Corral) -> None:
    nothing = corral("status")
    assert nothing.code == 3
    assert "corral up" in nothing.err
    corral("up", str(corral.model), "--name", "ended")
    corral("down")
    assert corral("status", "--json").json()["name"] == "ended"  # the only one there is
    corral("up", str(corral.model), "--name", "a")
    assert corral("status", "--json").json()["name"] == "a"  # the only one that has not ended
    corral("up", str(corral.model), "--name", "b")
    both = corral("down")
    assert both.code == 2
    assert "a, b" in both.err
    assert corral("down", "a", "b").code == 0


def test_on_means_a_profile_everywhere() -> None:
    for verb, (place, _) in VERBS.items():
        module, _, attribute = place.partition(":")
        todo = [getattr(importlib.import_module(module), attribute)]
        while todo:
            command = todo.pop()
            todo += getattr(command, "commands", {}).values()
            for option in command.params:
                assert "--on" not in option.opts or option.metavar == "PROFILE", f"corral {verb} … {command.name}"
                assert "--deployment" not in option.opts or option.metavar == "NAME" or option.required, verb


def test_the_plain_screen_and_the_summary(corral: Corral) -> None:
    up = corral("up", str(corral.model))
    for phase in ("installing engine", "fetching model", "starting", "loading", "ready"):
        assert phase in up.err
    for word in ("endpoint", "curl", "OpenAI(base_url=", "corral down tiny", "Paris."):
        assert word in up.out


@pytest.mark.parametrize(
    "name", ["with space", "it's", 'say "x"', "a/b", "..", ".hidden", "ünï", "-x", "a%20b", "$(id)"]
)
def test_names_do_no_harm(corral: Corral, name: str) -> None:
    up = corral("up", str(corral.model), f"--name={name}", "--json")
    assert up.code == 0, up.err
    assert up.json()["name"] == name
    folder = Path(up.json()["endpoint"]["key_file"]).parent
    assert folder.parent == corral.home / "corral" / "deployments"
    assert corral("ps", "--json").json()[0]["name"] == name
    assert corral("down", "--", name).code == 0


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00b"[:1] + "\x01", "x" * 200])
def test_names_that_are_refused(corral: Corral, name: str) -> None:
    up = corral("up", str(corral.model), f"--name={name}")
    assert up.code == 2
    assert "cannot name a deployment" in up.err


def test_hostile_paths(corral: Corral, tmp_path: Path) -> None:
    home = tmp_path / "a 'home'\nwith \"signs\""
    home.mkdir()
    (home / "corral").mkdir()
    (home / "corral" / "engines").symlink_to(corral.home / "corral" / "engines")
    model = tmp_path / 'my model\'s "folder"'
    model.symlink_to(corral.model)
    env = {"CORRAL_HOME": str(home / "corral")}
    up = corral("up", str(model), "--name", "x", "--served-name", "s", "--json", **env)
    assert up.code == 0, up.err
    assert corral("down", "x", **env).code == 0


def test_names_that_clients_say_are_apart_from_the_deployments(corral: Corral) -> None:
    """A path, as Kempner's clients say it, names no folder; further names are the same model's."""
    path = "/n/models/Llama-3.1-405B"
    words = ["up", str(corral.model), "--served-name", path, "--served-name", "llama", "--dry-run", "--json"]
    spec = corral(*words).json()
    assert spec["deployment"] == corral.model.name
    argv = spec["ranks"][0]["argv"]
    there = argv.index("--served-model-name")
    assert argv[there + 1 : there + 3] == [path, "llama"]
    assert argv[there + 3].startswith("--")
    assert spec["served_name"] == path
    refused = corral(*words, "--served-name=-x")
    assert (refused.code, "cannot be one of several names" in refused.err) == (2, True)


def test_a_failed_start_ends_with_cause_remedy_and_log(corral: Corral) -> None:
    up = corral("up", str(corral.model), STUB_OPTIONS="exit=0")
    assert up.code == 8
    assert "failed" in up.err
    assert "something the engine did not like" in up.err
    assert "→" in up.err
    assert "last lines of the log" in up.err
    assert "Traceback" not in up.err
    assert corral("status", "tiny").code == 8
    as_json = corral("up", str(corral.model), "--json", STUB_OPTIONS="exit=0")
    assert as_json.code == 8
    assert as_json.json()["error"]["reason"] == "bad_argument"
    assert corral("up", str(corral.model), "--json").code == 0  # the name is free again


def test_engine_dies_with_zero_later(corral: Corral) -> None:
    port = str(free_port())
    assert corral("up", str(corral.model), "--no-wait", "--port", port, STUB_OPTIONS="die-after-ready=0").code == 0
    failed = corral.wait_state("tiny", "failed")
    assert failed["reason"] == "engine_exited"
    assert "code 0" in failed["text"]


def test_cli_killed_while_loading_leaves_a_server_that_becomes_ready(corral: Corral) -> None:
    process = corral.start("up", str(corral.model), "--port", str(free_port()))
    until((corral.home / "corral/deployments/tiny/rank0/agent.json").exists, "the agent")
    process.kill()
    process.communicate()
    assert corral("wait", "tiny").code == 0
    status = corral("status", "tiny", "--json").json()
    assert status["state"] == "ready"
    rows = {row["name"]: row for row in status["plan_against_engine"]["rows"]}  # though nobody waited at the start
    assert rows["kv_tokens"]["observed"] == 914304
    assert '"kv_tokens"' in (corral.home / "corral/calibration.jsonl").read_text()


def test_agent_killed_with_its_supervisor_is_a_failure_and_down_cleans_up(corral: Corral) -> None:
    assert corral("up", str(corral.model), "--json").code == 0
    supervisor = json.loads((corral.home / "corral/deployments/tiny/rank0/agent.json").read_text())["pid"]
    worker = next(pid for pid, row in process_table().items() if row[0] == supervisor)
    os.kill(worker, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    failed = corral.wait_state("tiny", "failed")
    assert failed["reason"] == "agent_killed"
    assert corral("down", "tiny").code == 0
    assert not launched(corral, "tiny")


def test_after_a_reboot_it_is_stopped_never_ready(corral: Corral) -> None:
    assert corral("up", str(corral.model), "--json").code == 0
    record = corral.home / "corral/deployments/tiny/rank0/agent.json"
    body = json.loads(record.read_text())
    assert corral("down", "tiny").code == 0
    events = corral.home / "corral/deployments/tiny/rank0/events.jsonl"
    lines = events.read_text().splitlines()
    events.write_text("\n".join(lines[:-1]) + "\n")  # as a power cut leaves it: the last word was "ready"
    record.write_text(json.dumps({**body, "boot_id": "another boot"}))
    status = corral("status", "tiny", "--json").json()
    assert (status["state"], status["reason"]) == ("stopped", "machine_restarted")


def test_an_interrupted_staging_is_told_and_the_name_is_free(corral: Corral) -> None:
    assert corral.apart("up", str(corral.model), "--json").code == 0  # by a process that is gone since
    assert corral("down", "tiny").code == 0
    folder = corral.home / "corral/deployments/tiny"
    for path in (folder / "rank0").iterdir():
        path.unlink()
    (folder / "rank0").rmdir()
    status = corral("status", "tiny", "--json").json()
    assert (status["state"], status["reason"]) == ("stopped", "interrupted")
    assert corral("up", str(corral.model), "--json").code == 0


def test_down_while_staging_ends_the_up(corral: Corral) -> None:
    engine = Path(engines.expected("cpu").path) / "engine.json"
    held = engine.parent.with_name(f".{engine.parent.name}.lock")
    text = engine.read_text()
    engine.unlink()  # so that `up` must install, and waits for the lock
    held.write_text(json.dumps(vars(identify(os.getpid()))))
    process = corral.start("up", str(corral.model))
    assert corral.wait_state("tiny", "staging")
    down = corral.start("down", "tiny")
    until((corral.home / "corral/deployments/tiny/stop").exists, "the wish to stop")
    engine.write_text(text)
    held.unlink()
    assert down.communicate(timeout=120)[0].strip() == "tiny: stopped"
    _, err = process.communicate(timeout=120)
    assert process.returncode == 8
    assert "stopped by `corral down`" in err
    assert corral("ps", "-a", "--json").json() == []


def test_one_unreadable_deployment_hides_no_other(corral: Corral) -> None:
    assert corral("up", str(corral.model), "--json").code == 0
    torn = corral.home / "corral/deployments/torn"
    torn.mkdir()
    (torn / "deployment.json").write_text('{"name": "to')
    shown = {status["name"]: status["state"] for status in corral("ps", "--json").json()}
    assert shown == {"tiny": "ready", "torn": "unknown"}
    assert corral("down", "--all").code == 10
    assert corral("status", "tiny", "--json").json()["state"] == "stopped"


def test_an_unwritable_home_is_no_traceback(corral: Corral) -> None:
    done = corral("engine", "install", "cpu", CORRAL_HOME="/proc/nope")
    assert done.code == 10
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, 10), (errno.ENOSPC, 10), (errno.ECONNRESET, 9)])
def test_a_file_that_fails_is_not_a_batch_with_failed_rows(
    corral: Corral, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("corral.use.batch.batch.run_batch", fail)
    (corral.home / "rows.jsonl").write_text('{"prompt": "a"}\n')
    done = corral("batch", str(corral.home / "rows.jsonl"), "-o", str(corral.home / "out.jsonl"))
    assert done.code == code
    assert os.strerror(number) in done.err


def test_variables_that_would_open_the_door_are_refused(corral: Corral) -> None:
    for name in ("CORRAL_KEY_FILE", "VLLM_API_KEY", "PYTHONPATH", "VLLM_USE_RUST_FRONTEND"):
        done = corral("up", str(corral.model), "--env", f"{name}=x")
        assert done.code == 2
        assert name in done.err


def test_a_taken_port_is_named_and_another_chosen(corral: Corral) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refused = corral.apart("up", str(corral.model), "--port", str(port))
        assert refused.code == 4
        assert f"port {port} is held by process {os.getpid()}" in refused.err
        assert not (corral.home / "corral/deployments/tiny").exists()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_port_taken_while_the_engine_starts(corral: Corral, fixed: bool) -> None:
    """Two vLLM servers can share a port without either being told: half of the requests would go astray."""
    fixed_port = free_port()
    taken = corral.home / "taken"  # the engine binds its port once this is there
    options = ["--port", str(fixed_port)] if fixed else []
    process = corral.start("up", str(corral.model), "--json", *options, STUB_OPTIONS=f"after={taken}")
    launch = corral.home / "corral/deployments/tiny/launch.json"
    until((launch.parent / "rank0" / "agent.json").exists, "the agent")
    port = int(json.loads(launch.read_text())["base_url"].split(":")[2].split("/")[0])
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier test may linger
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        rival.bind(("127.0.0.1", port))
        rival.listen()
        taken.touch()
        out, err = process.communicate(timeout=120)
    if fixed:
        assert process.returncode == 8
        assert f"another process took port {fixed_port} first" in err
    else:
        assert process.returncode == 0, err
        assert f":{port}/" not in json.loads(out)["endpoint"]["base_url"]


def test_dry_run_is_the_launch(corral: Corral) -> None:
    port = str(free_port())
    dry = corral(
        "up", str(corral.model), "--dry-run", "--json", "--port", port, "--", "--max-num-seqs", "4", "--seed", "7"
    )
    assert dry.code == 0, dry.err
    spec = dry.json()
    argv = spec["ranks"][0]["argv"]
    assert argv[-2:] == ["--seed", "7"]
    assert argv.count("--max-num-seqs") == 1
    assert argv[argv.index("--max-num-seqs") + 1] == "4"
    assert not (corral.home / "corral/deployments").exists()
    up = corral("up", str(corral.model), "--port", port, "--json", "--", "--max-num-seqs", "4", "--seed", "7")
    assert up.code == 0, up.err
    real = json.loads((corral.home / "corral/deployments/tiny/launch.json").read_text())
    assert {**real, "launch_id": ""} == {**spec, "launch_id": ""}
    started = Path(f"/proc/{json.loads(corral('events', 'tiny', '--json').out.splitlines()[0])['pid']}/cmdline")
    assert started.read_bytes().decode().split("\0")[-3:-1] == argv[-2:]


def test_dry_run_as_shell_commands(corral: Corral, shellcheck: Shellcheck) -> None:
    dry = corral("up", str(corral.model), "--name", "it's", "--dry-run", "--shell")
    assert dry.code == 0
    assert "corral_guard.Guard" in dry.out
    shellcheck("#!/bin/sh\n" + dry.out)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "no-such-model"], 3, "no model is called 'no-such-model'"),
        (["up", "./no/such/folder"], 3, "no folder"),
        (["up", "llama-3.1-8b", "--", "--swap-space", "4"], 7, "no --swap-space any more"),
        (["up", "--", "--max-model-le", "4"], 7, "--max-model-len"),
        (["up", "--flavour", "cuda"], 2, "no GPU"),
        (["up", "--shell"], 2, "--dry-run"),
        (["up", "--env", "x"], 2, "NAME=VALUE"),
        (["up", "--set", "tensr=2"], 2, "tensor"),
        (["status", "nobody"], 3, "no deployment is called 'nobody'"),
        (["down"], 3, "no deployment yet"),
        (["logs", "nobody"], 3, "no deployment"),
        (["sttus"], 2, "status"),
        (["engine", "check", "cuda"], 3, "not installed"),
        (["engine", "remove", "cuda"], 3, "no engine"),
    ],
)
def test_bad_input_is_one_clear_sentence(corral: Corral, arguments: list[str], code: int, words: str) -> None:
    done = corral(*arguments)
    assert done.code == code, done.err
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_folder_without_a_model(corral: Corral, tmp_path: Path) -> None:
    done = corral("up", str(tmp_path))
    assert done.code == 10
    assert "no config.json" in done.err
    (tmp_path / "config.json").write_text((corral.model / "config.json").read_text())
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = corral("up", str(tmp_path))
    assert done.code == 10
    assert "lacks 2 of 2 weight files" in done.err
    assert not list((corral.home / "corral/deployments").glob("[!.]*"))


def test_debug_shows_the_traceback(corral: Corral) -> None:
    assert "Traceback" in corral.apart("--debug", "status", "nobody").err

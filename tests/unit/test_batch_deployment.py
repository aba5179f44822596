"""Batches on deployments: the only one by default, one that dies and comes back, and one that the batch starts."""

from __future__ import annotations

import json
import time
from pathlib import Path

from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import deployments
from corral.engines import environments as engines
from tests.chains import write_chain
from tests.unit.conftest import Corral
from tests.until import free_port


def rows(tmp_path: Path, count: int) -> tuple[str, Path]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n, "prompt": f"Row {n}"}) + "\n" for n in range(count)))
    return str(path), tmp_path / "out.jsonl"


def ids(output: Path) -> list[int]:
    return sorted(json.loads(line)["id"] for line in output.read_text().splitlines())


def test_the_only_deployment_dies_and_the_batch_waits_for_its_restart(answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 300)
    environment = {"FAKE_FAULT": "die:after=100", "FAKE_RATE": "400"}
    up = answering("up", str(answering.model), "--name", "one", "--restart", "2", **environment)
    assert up.code == 0, up.err
    done = answering("batch", given, "-o", str(output), "--backoff", "0.02")
    assert done.code == 0, done.err
    assert ids(output) == list(range(300))
    assert answering("status", "one", "--json").json()["restarts"] == 1


def test_a_failed_deployment_ends_the_batch_at_once_with_its_diagnosis(answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 300)
    environment = {"FAKE_FAULT": "die:after=100", "FAKE_RATE": "400"}
    assert answering("up", str(answering.model), "--name", "one", **environment).code == 0
    while_running = answering("batch", given, "-o", str(output), "--backoff", "0.02")
    assert while_running.code == 8, while_running.err
    assert "'one' has failed: " in while_running.err
    assert "Everything up to here is kept" in while_running.err
    done = len(ids(output))
    assert 0 < done < 300
    at_first = answering("batch", given, "-o", str(output), "--deployment", "one", "--json")
    assert at_first.code == 8, at_first.err
    assert json.loads(at_first.out.splitlines()[-1])["error"]["state"] == "failed"
    waited = answering("batch", given, "-o", str(output), "--wait", "--patience", "0.5", "--deployment", "one")
    assert waited.code == 9, waited.err
    assert "waiting: 'one' has failed: " in waited.err
    assert answering("complete", "--deployment", "one", "Hello").code == 8  # nothing else waits for it either
    assert answering("up", str(answering.model), "--name", "one").code == 0
    assert answering("batch", given, "-o", str(output)).code == 0
    assert ids(output) == list(range(300))
    assert answering("down", "one").code == 0
    stopped = answering("batch", given, "-o", str(tmp_path / "other.jsonl"), "--deployment", "one")
    assert stopped.code == 3, stopped.err
    assert "'one' is stopped" in stopped.err


def test_a_deployment_that_is_still_starting_is_waited_for(answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 10)
    assert answering("up", str(answering.model), "--name", "late", "--no-wait", "--port", str(free_port())).code == 0
    done = answering("batch", given, "-o", str(output))
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out.jsonl.corral" / "job.json").read_text())["model"] == "tiny"
    assert "already complete" in answering("batch", given, "-o", str(output)).err


def test_a_batch_goes_on_at_the_successor(answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 600)
    assert answering("up", str(answering.model), "--name", "one", FAKE_RATE="4").code == 0  # for minutes of work
    batch = answering.start("batch", given, "-o", str(output), "--backoff", "0.02")
    while not output.is_file() or len(output.read_text().splitlines()) < 5:
        assert batch.poll() is None, batch.communicate()
        time.sleep(0.05)
    assert answering("up", str(answering.model), "--name", "one~2").code == 0
    write_chain("one", "one~2")
    assert len(output.read_text().splitlines()) < 600
    deployments.stop(DeploymentFolder.of("one"))
    _, err = batch.communicate(timeout=120)
    assert batch.returncode == 0, err
    assert ids(output) == list(range(600))
    more = answering("batch", given, "-o", str(tmp_path / "more.jsonl"))  # nobody is named, and the first has ended
    assert more.code == 0, more.err


def test_offline_starts_a_model_runs_and_stops_it(answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 50)
    argv = ["batch", given, "-o", str(output), "--start", str(answering.model)]
    done = answering(*argv)
    assert done.code == 0, done.err
    assert ids(output) == list(range(50))
    states = [entry["state"] for entry in answering("ps", "--json").json()]
    assert states in ([], ["stopped"])
    again = answering(*argv)
    assert "already complete" in again.err
    assert "starting" not in again.err


def test_a_bad_input_is_refused_before_a_model_is_started(answering: Corral, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": 5}\n')
    done = answering("batch", str(path), "-o", str(tmp_path / "o.jsonl"), "--start", str(answering.model))
    assert done.code == 10
    assert "starting" not in done.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_offline_counts_long_prompts_with_the_tokenizer_on_disk(answering: Corral, tmp_path: Path) -> None:
    python = Path(engines.expected("cpu").path) / "bin" / "python"
    counts = 'case "$1" in *count_tokens.py) test -f "$2/tokenizer.json" && exec sed "s/.*/5000/";; esac\n'
    python.write_text(python.read_text().replace("exec", counts + "exec", 1))
    given, output = rows(tmp_path, 3)
    with Path(given).open("a") as file:
        file.write(json.dumps({"id": "long", "prompt": "x y " * 3000}) + "\n")
    argv = ["batch", given, "-o", str(output), "--start", str(answering.model), "--context", "1000"]
    done = answering(*argv)
    assert done.code == 10, done.err
    assert "line 4 has 5000 tokens; the context holds 1000" in done.err
    assert "starting" not in done.err


def test_several_deployments_must_be_chosen_from(answering: Corral, tmp_path: Path) -> None:
    given, output = rows(tmp_path, 40)
    for name in ("a", "b"):
        assert answering("up", str(answering.model), "--name", name).code == 0
    refused = answering("batch", given, "-o", str(output))
    assert refused.code == 2
    assert "a, b" in refused.err
    both = answering("batch", given, "-o", str(output), "--deployment", "a", "--deployment", "b")
    assert both.code == 0, both.err
    assert ids(output) == list(range(40))

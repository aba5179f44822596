"""The Ray Data path without Ray: the same promise, with an engine that dies of bad rows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from corral.base.errors import EngineError, UsageError
from corral.cli import main
from corral.plan.hardware.inventory import common_cpu, parse_cpuinfo
from corral.use.batch.batch import BatchResult, run_batch, saved_spec
from corral.use.batch.core.run import Quiet
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.input.recipe import Recipe
from corral.use.batch.inspect import inspect
from corral.use.batch.ray_engine import (
    AnswerEngine,
    EngineDiedError,
    RayAnswer,
    engine_settings,
    format_on,
    read_answer,
    why_died,
)
from corral.use.batch.ray_run import run_on_engine
from corral.use.batch.serving import Served
from corral.use.batch.spec import BatchServers, BatchSpec, ModelToStart, folder_of

MODEL = ModelToStart("model", engine="ray-data")


class Brittle:
    """Answers rows; dies of "poison", leaves "lost" out, and reports "bad" as Ray does."""

    def __init__(self, dies_at: int = 10**9) -> None:
        self.passes: list[int] = []
        self._dies_at = dies_at

    def answers(self, rows: Path, chat: bool) -> Iterator[RayAnswer]:
        asked = [json.loads(line) for line in rows.read_text().splitlines()]
        self.passes.append(len(asked))
        for place, row in enumerate(asked):
            text = row["messages"][-1]["content"] if chat else row["prompt"]
            if "poison" in text or place >= self._dies_at:
                raise RuntimeError("the actor died")
            if "lost" in text:
                continue
            error = "ValueError: too long" if "bad" in text else ""
            yield RayAnswer(row["corral_row"], f"re {text}", error, 3, 2)


def run_on_ray(
    order: BatchSpec, offline: ModelToStart, listener: Quiet, engine: AnswerEngine | None = None
) -> BatchResult:
    @contextlib.contextmanager
    def serve() -> Iterator[Served]:
        assert engine is not None
        yield Served({"model": offline.model}, partial(run_on_engine, lambda _: engine, offline.model))

    return run_batch(
        order, BatchServers(start_model=offline), RunnerSettings(), listener, serve=serve if engine else None
    )


def order(tmp_path: Path, prompts: list[str], **more: object) -> BatchSpec:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": n, "prompt": prompt}) + "\n" for n, prompt in enumerate(prompts)))
    return BatchSpec(str(path), str(tmp_path / "o.jsonl"), **more)  # type: ignore[arg-type]


def test_one_bad_row_costs_one_row(tmp_path: Path) -> None:
    prompts = [f"p{n}" for n in range(40)]
    prompts[5], prompts[17], prompts[30] = "poison", "bad", "lost"
    engine = Brittle()
    result = run_on_ray(order(tmp_path, prompts), MODEL, Quiet(), engine=engine)
    assert (result.summary.fine, result.summary.failed, result.summary.left) == (37, 3, 0)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines} == set(range(40)) - {5, 17, 30}
    assert all(line["response"] == f"re p{line['id']}" for line in lines)
    errors = [json.loads(line) for line in (tmp_path / "o.errors.jsonl").read_text().splitlines()]
    assert {error["custom_id"] for error in errors} == {"5", "17", "30"}
    saved_spec = run_on_ray(order(tmp_path, prompts), MODEL, Quiet(), engine=Brittle())
    assert saved_spec.summary.before == 40


def test_a_pass_that_dies_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    engine = Brittle(dies_at=7)
    result = run_on_ray(order(tmp_path, [f"p{n}" for n in range(20)]), MODEL, Quiet(), engine=engine)
    assert result.summary.fine == 20
    assert engine.passes == [20, 13, 6]


def test_openai_rows_and_chat(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, "stop": "x"}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    run_on_ray(BatchSpec(str(tmp_path / "in.jsonl"), str(tmp_path / "o.jsonl")), MODEL, Quiet(), engine=Brittle())
    line = json.loads((tmp_path / "o.jsonl").read_text())
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "re hi"
    assert line["response"]["body"]["usage"]["total_tokens"] == 5
    assert line["response"]["body"]["choices"][0]["finish_reason"] == "stop"  # two of four tokens


def test_what_ray_cannot_do_goes_to_the_error_file(tmp_path: Path) -> None:
    result = run_on_ray(order(tmp_path, ["p"], recipe=Recipe(params={"n": 2})), MODEL, Quiet(), engine=Brittle())
    assert result.summary.failed == 1


def test_rays_rows_are_read() -> None:
    row = {"corral_row": 3, "generated_text": "x", "num_input_tokens": 4, "num_generated_tokens": 1}
    assert read_answer({**row, "__inference_error__": ""}) == RayAnswer(3, "x", "", 4, 1)
    assert read_answer({"corral_row": 1, "__inference_error__": "E"}).error == "E"


def test_without_ray_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ray is needed"):
        run_on_ray(order(tmp_path, ["p"]), MODEL, Quiet())


def test_resume_finds_the_engine_again(tmp_path: Path) -> None:
    model = ModelToStart("model", 512, ("eager=true",), engine="ray-data")
    run_on_ray(order(tmp_path, ["p"]), model, Quiet(), engine=Brittle())
    assert saved_spec(str(tmp_path / "o.jsonl"))[1].start_model == model


def test_what_is_set_reaches_the_engine() -> None:
    given = engine_settings(512, ("eager=true", "tensor=2", "max_num_seqs=64"))
    assert given == {"max_model_len": 512, "enforce_eager": True, "tensor_parallel_size": 2, "max_num_seqs": 64}
    with pytest.raises(UsageError, match="--set data does not go with"):
        engine_settings(None, ("data=2",))
    assert engine_settings(None, ("weights=bf16",)) == {"dtype": "bfloat16"}
    with pytest.raises(UsageError, match="--set weights does not go with"):
        engine_settings(None, ("weights=fp8",))


CPUS = {path.stem: parse_cpuinfo(path.read_text()) for path in (Path(__file__).parent / "cpuinfo").glob("*.txt")}


@pytest.mark.parametrize(
    ("cpus", "given", "dtype", "word"),
    [
        (("neoverse-n1",), None, "float32", "computes in fp32: Neoverse-N1 has no bf16"),
        (("neoverse-n1",), "bfloat16", None, "bfloat16 may be slow or fail here: Neoverse-N1 has no bf16"),
        (("neoverse-n1",), "float32", None, ""),
        (("grace",), None, None, ""),
        (("sapphire-rapids",), "float16", None, ""),
        (("grace", "altra"), None, "float32", "computes in fp32"),  # one format that suits all nodes
        (("zen3", "grace"), None, "float32", "nothing is known of this CPU"),
        ((), None, "float32", "nothing is known of this CPU"),
    ],
)
def test_without_gpus_ray_computes_in_what_its_cpus_are_quick_in(
    cpus: tuple[str, ...], given: str | None, dtype: str | None, word: str
) -> None:
    chosen, said = format_on(common_cpu([CPUS[name] for name in cpus]), given)
    assert chosen.get("dtype") == dtype
    assert word in said if word else not said


class Dead:
    """An engine that never starts."""

    def __init__(self) -> None:
        self.passes = 0

    def answers(self, rows: Path, chat: bool) -> Iterator[RayAnswer]:
        self.passes += 1
        raise RuntimeError("no such model")
        yield


def test_an_engine_that_never_starts_ends_the_job(tmp_path: Path) -> None:
    dead = Dead()
    asked = order(tmp_path, [f"p{n}" for n in range(64)])
    with pytest.raises(EngineError, match="no such model"):
        run_on_ray(asked, MODEL, Quiet(), engine=dead)
    assert dead.passes == 3  # all, the first alone, the last alone
    assert run_on_ray(asked, MODEL, Quiet(), engine=Brittle()).summary.fine == 64


class Failing(Brittle):
    """Answers so many rows, then dies of every one, each time under another address."""

    def __init__(self, lives_for: int) -> None:
        super().__init__()
        self._lives_for = lives_for

    def answers(self, rows: Path, chat: bool) -> Iterator[RayAnswer]:
        for answer in super().answers(rows, chat):
            if self._lives_for <= 0:
                raise RuntimeError(f"the actor at 0x{len(self.passes):x} died: mkldnn_matmul")
            self._lives_for -= 1
            yield answer


def test_an_engine_that_dies_three_times_in_a_row_ends_the_batch_with_its_reason(tmp_path: Path) -> None:
    engine = Failing(lives_for=7)
    asked = order(tmp_path, [f"p{n}" for n in range(100)])
    with pytest.raises(EngineError, match=r"3 times in a row .*mkldnn_matmul"):
        run_on_ray(asked, MODEL, Quiet(), engine=engine)
    assert engine.passes == [100, 93, 46, 1]  # what it brought, two deaths, and a row that it had answered before
    result = run_on_ray(asked, MODEL, Quiet(), engine=Brittle())
    assert (result.summary.before, result.summary.fine, result.summary.failed) == (7, 93, 0)  # no row is blamed


def test_several_poisonous_rows_are_not_taken_for_a_dead_engine(tmp_path: Path) -> None:
    prompts = [f"p{n}" for n in range(20)]
    for number in (4, 5, 6, 7, 12):
        prompts[number] = "poison"
    result = run_on_ray(order(tmp_path, prompts), MODEL, Quiet(), engine=Brittle())
    assert (result.summary.fine, result.summary.failed) == (15, 5)
    assert result.summary.output_tokens == 30  # asking an answered row again counts nothing


def test_single_rows_of_many_kinds_end_on_a_dead_engine(tmp_path: Path) -> None:
    path, dead = tmp_path / "in.jsonl", Dead()
    names = ("top_k", "seed", "min_p", "top_p", "presence_penalty")
    path.write_text("".join(json.dumps({"id": name, "prompt": "p", name: 1}) + "\n" for name in names))
    with pytest.raises(EngineError, match="3 times in a row"):
        run_on_ray(BatchSpec(str(path), str(tmp_path / "o.jsonl")), MODEL, Quiet(), engine=dead)
    assert dead.passes == 3


def test_the_log_of_the_engines_worker_says_why_it_died(tmp_path: Path) -> None:
    assert why_died(None, 0) is None
    assert why_died(tmp_path, 0) is None
    (tmp_path / "worker-1-01-7.err").write_text("RuntimeError: something odd\n")
    (tmp_path / "worker-2-01-8.out").write_text("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    (tmp_path / "worker-3-01-9.out").write_text("INFO all is well\n")
    found = why_died(tmp_path, 0)
    assert found is not None
    assert "ran out of memory" in found.cause  # a known cause before an unknown error
    assert "2.00 GiB" in str(EngineDiedError("ActorDiedError: it died", found))
    (tmp_path / "worker-2-01-8.out").unlink()
    other = why_died(tmp_path, 0)
    assert other is not None
    assert "something odd" in other.cause
    assert why_died(tmp_path, time.time() + 60) is None  # of an earlier run


def test_a_poisonous_first_row_is_not_taken_for_a_dead_engine(tmp_path: Path) -> None:
    engine = Brittle()
    result = run_on_ray(order(tmp_path, ["poison", *(f"p{n}" for n in range(9))]), MODEL, Quiet(), engine=engine)
    assert (result.summary.fine, result.summary.failed) == (9, 1)


def test_failed_rows_are_tried_again_on_request(tmp_path: Path) -> None:
    asked = order(tmp_path, ["p", "bad"])
    assert run_on_ray(asked, MODEL, Quiet(), engine=Brittle()).summary.failed == 1
    saved_spec = Brittle()
    run_on_ray(replace(asked, retry_failed=True), MODEL, Quiet(), engine=saved_spec)
    assert saved_spec.passes == [1]


def test_cancel_stops_it_and_status_knows(tmp_path: Path) -> None:
    asked = order(tmp_path, [f"p{n}" for n in range(600)])

    class Cancelling(Brittle):
        def answers(self, rows: Path, chat: bool) -> Iterator[RayAnswer]:
            for answer in super().answers(rows, chat):
                folder_of(asked.output, False).cancel.touch()
                yield answer

    summary = run_on_ray(asked, MODEL, Quiet(), engine=Cancelling()).summary
    assert summary.state == "cancelled"
    assert 0 < summary.fine < 600
    assert inspect(asked.output).state == "cancelled"
    assert run_on_ray(asked, MODEL, Quiet(), engine=Brittle()).summary.state == "done"
    assert inspect(asked.output).state == "done"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "needs the model"),
        (["--start", "m"], "ray is needed"),
        (["--start", "m", "--jobs", "2"], "starts its own engines"),
        (["--start", "m", "--url", "http://127.0.0.1:1"], "starts its own engines"),
        (["--start", "m", "--hosts", "a,b"], "on a Ray cluster that is there"),
    ],
)
def test_the_command_refuses_what_ray_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    (tmp_path / "in.txt").write_text("p\n")
    argv = ["batch", str(tmp_path / "in.txt"), "-o", str(tmp_path / "o.jsonl"), "--engine", "ray-data", *given]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err

"""The one reader of traces: both forms, and what is said of a line that cannot be used, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from corral.base.errors import DataError
from corral.client.trace import REMEDY, TracedRequest, read_trace
from corral.lab.bench.datasets import load_prompts
from corral.lab.bench.spec import Workload
from corral.lab.simulate.requests import trace_requests
from corral.lab.tune.workload import workload_of

SECONDS = '{"time_s": 0.5, "prompt_tokens": 3, "output_tokens": 4}'
MILLISECONDS = '{"timestamp": 500, "input_length": 3, "output_length": 4}'


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str, coding: str = "utf-8") -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_bytes("\n".join(lines).encode(coding))
        return path

    return write


def test_both_forms_say_the_same(written: Callable[..., Path]) -> None:
    found = list(read_trace(written(SECONDS, "", MILLISECONDS + "\r", coding="utf-8-sig")))
    assert found == [TracedRequest(0.5, 3, 4)] * 2
    assert found[0].tokens == 7


def test_a_sum_is_enough_only_where_nothing_else_counts(written: Callable[..., Path]) -> None:
    path = written('{"time_s": 2, "tokens": 5}')
    assert [one.tokens for one in read_trace(path, sums=True)] == [5]
    with pytest.raises(DataError, match=r'no usable "prompt_tokens": {"time_s": 2, "tokens": 5}'):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 1, "input_length": "x", "output_length": 3}', 'no usable "input_length": "x"'),
        ('{"timestamp": 0, "input_length": -1, "output_length": 3}', 'no usable "input_length": -1'),
        ('{"timestamp": 0, "input_length": 1, "output_length": 2.5}', 'no usable "output_length": 2.5'),
        ('{"timestamp": 0, "input_length": true, "output_length": 2}', 'no usable "input_length": true'),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 3}', "not valid JSON: NaN is not a number"),
        ('{"time_s": "noon", "prompt_tokens": 1, "output_tokens": 1}', 'no usable "time_s": "noon"'),
        ('{"time_s": 1e300, "prompt_tokens": 1, "output_tokens": 1}', 'no usable "time_s": 1e'),
        ('{"prompt_tokens": 1, "output_tokens": 1}', 'no usable "time_s": {"prompt_tokens": 1'),
        ("[1]", r"not a JSON object: \[1\]"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested|bytes"),
    ],
)
def test_a_bad_line_is_named_alike_by_everybody(written: Callable[..., Path], line: str, said: str) -> None:
    path = written(SECONDS, "", line)
    told = set()
    for read in (
        lambda: list(read_trace(path, sums=True)),
        lambda: list(trace_requests(str(path))),
        lambda: load_prompts(Workload(dataset="trace", file=str(path)), None),
    ):
        with pytest.raises(DataError, match=f"line 3 of {path}.*({said})") as caught:
            read()
        told.add((caught.value.message, caught.value.remedy))
    assert len(told) == 1
    assert told.pop()[1] == REMEDY


def test_no_requests_no_tokens_and_no_text_are_refused(written: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="no requests"):
        list(read_trace(written("", "")))
    with pytest.raises(DataError, match="no tokens"):
        list(read_trace(written('{"time_s": 1, "prompt_tokens": 0, "output_tokens": 0}')))
    with pytest.raises(DataError, match=r"line 2 .* not UTF-8"):
        list(read_trace(written(SECONDS, '{"time_s": 1, "x": "\xe4"}', coding="latin-1")))


def test_times_that_go_back_are_refused_where_the_order_counts(written: Callable[..., Path]) -> None:
    path = written(SECONDS, SECONDS.replace("0.5", "0.25"))
    assert len(list(read_trace(path))) == 2
    with pytest.raises(DataError, match=r"line 2 .* earlier than the one before: 0.25 s after 0.5 s"):
        list(trace_requests(str(path)))


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (SECONDS, "trace"),
        (MILLISECONDS, "trace"),
        ('{"prompt": "a", "timestamp": 2.5}', "custom"),
        ('{"custom_id": "a", "body": {}}', "batch"),
        ("no JSON", "custom"),
    ],
)
def test_a_workloads_file_is_known_by_its_first_line(written: Callable[..., Path], line: str, kind: str) -> None:
    assert workload_of(str(written("", line)), chat=False, seed=1).dataset == kind

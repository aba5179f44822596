"""Whatever comes from outside, and however it was changed on the way: a value of its type, or one clear error.

Each test gives its decoder arbitrary JSON, valid answers with a part replaced, and raw bytes. Examples that once
found something are in `KEPT`, and run first.
"""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from corral.base.errors import CorralError
from corral.base.shell import Completed
from corral.base.untrusted import parse_json, plain
from corral.client.metrics import parse
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import RankFolder
from corral.deploy.targets.ssh_reports import mirror, read_report, read_started, read_stopped
from corral.deploy.transfer.courier_events import KINDS, read_event
from corral.engines.flags import check_arguments, shipped_flags
from corral.engines.recipes import applied, read_table, recipe_for
from corral.node.agent import gang_connection
from corral.node.courier import manifest
from corral.node.courier.protocol import CourierError
from corral.plan.hardware.survey import read_answer
from corral.plan.models.facts import facts_from_folder
from tests.fuzz.conftest import Fuzz

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
KEPT: list[bytes] = [
    b"",
    b"{}",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"NaN",
    b"1" * 5000,
    b'"\\ud800"',
    b"\xff",
    b"1e999",
    b"null",
]
raw = st.binary(max_size=200) | st.sampled_from(KEPT)
Report = dict[str, Any]


def changed(whole: Any) -> st.SearchStrategy[Any]:
    """The whole value with some of its parts replaced, left out, or beside others."""
    if isinstance(whole, dict):
        kept = st.fixed_dictionaries({}, optional={name: changed(value) for name, value in whole.items()})
        return kept | st.just(whole) | anything | st.builds(lambda one, more: {**one, **more}, kept, _objects)
    if isinstance(whole, list):
        return st.just(whole) | st.lists(changed(whole[0]) if whole else anything, max_size=3) | anything
    return st.just(whole) | anything


_objects = st.dictionaries(st.text(max_size=8), anything, max_size=2)
REPORT: Report = {
    "alive": True, "boot_id": "b", "files": {"engine.log": {"offset": 0, "data": base64.b64encode(b"x\n").decode()},
    "events.jsonl": {"offset": 0, "data": ""}}, "agent.json_age_s": 1.5, "heartbeat.json_age_s": 0.5,
    "agent.json": {"pid": 7, "host": "n", "boot_id": "b", "start_ticks": 9},
    "heartbeat.json": {"t": 1.0, "state": "ready", "phase": "x"},
}  # fmt: skip
ROW = {"path": "a/b", "kind": "file", "size": 5, "mode": 420, "mtime_ns": 5, "sha256": "0" * 64, "target": "../c"}
EVENT = {"t": 5.0, "kind": "state", "rank": 0, "elapsed_s": 1.0, "state": "ready", "reason": "requested", "text": "x",
         "failed_rank": 1, "log_from": 5, "done": 1, "total": 2}  # fmt: skip
STANDING = {"state": "ready", "phase": "x", "running": True, "quiet_s": 1.0, "done": 1, "ended": {"epoch": 1,
            "reason": "engine_exited", "text": "x", "ago_s": 1.0, "details": {"exit_code": 1}}}  # fmt: skip
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
          "num_hidden_layers": 2, "vocab_size": 100, "rope_scaling": {"type": "yarn", "factor": 2.0},
          "quantization_config": {"quant_method": "awq", "bits": 4, "ignore": ["lm_head"]}}  # fmt: skip
RECIPES = {"date": "2027-01-31", "source": "x", "templates": [{"has": "<tool>", "tool_parser": "hermes"}],
           "recipes": [{"models": ["qwen3*"], "except": ["*vl*"], "tool_parser": "hermes",
                        "reasoning_parser": "qwen3", "arguments": ["--tokenizer-mode", "hf"],
                        "environment": {"VLLM_USE_DEEP_GEMM": "0"},
                        "least_vllm": "0.12.0"}]}  # fmt: skip
SURVEY = {"began_s": 1.0, "ended_s": 2.0, "hostname": "n", "home": "/root", "cores": 4, "free_ports": [15000],
          "interfaces": [{"name": "eth0", "ipv4": ["10.0.0.1/24"], "speed_mbps": 10}], "errors": {}}  # fmt: skip


def text_of(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def refused_or_read(read: Callable[[bytes], object], *errors: type[Exception]) -> Callable[[object], None]:
    def check(value: object) -> None:
        with contextlib.suppress(CorralError, *errors):
            read(text_of(value))

    return check


def test_json(fuzz: Fuzz) -> None:
    fuzz(anything | raw, refused_or_read(lambda data: parse_json(data, "x")))


def test_text_for_people(fuzz: Fuzz) -> None:
    def check(value: object) -> None:
        found = plain(str(value))
        found.encode()  # no lone surrogates
        assert not any(character < " " and character not in "\t\n" for character in found)

    fuzz(st.text(), check)


def test_reports_of_nodes_write_nothing_but_their_own_files(fuzz: Fuzz) -> None:
    def check(value: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            rank = RankFolder(Path(folder) / "deployment" / "rank0")
            with contextlib.suppress(CorralError):
                mirror(rank, read_report(text_of(value).decode("utf-8", "replace"), "a", {}))
                read_events(rank.events)
            names = {path.name for path in Path(folder).rglob("*") if path.is_file()}
            assert names <= {"engine.log", "events.jsonl", "agent.json", "heartbeat.json"}

    paths = st.dictionaries(st.sampled_from(["../x", "/tmp/x", "key", "engine.log"]), anything, max_size=2)
    fuzz(changed(REPORT) | raw | st.builds(lambda files: {**REPORT, "files": files}, paths), check)


def test_starts_and_stops(fuzz: Fuzz) -> None:
    def check(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        with contextlib.suppress(CorralError):
            read_started(text, "a")
        read_stopped(text, "a")

    fuzz(changed({"pid": 5, "error": "x", "left": [1, "x"], "containers": ["x"]}) | raw, refused_or_read(check))


def test_surveys(fuzz: Fuzz) -> None:
    def read(data: bytes) -> object:
        return read_answer("a", Completed(("python3",), 0, data.decode("utf-8", "replace"), ""), 0.0, 1.0)

    fuzz(changed(SURVEY) | raw, refused_or_read(read))


def test_events_of_couriers(fuzz: Fuzz) -> None:
    kinds = st.sampled_from(sorted(KINDS))
    fields = changed({"address": "1.2.3.4", "port": 5, "files": [ROW], "names": ["x"], "hashes": {"0": "0" * 64},
                      "held": [[0, 1]], "done": 1, "total": 2, "text": "x"})  # fmt: skip
    events = st.builds(lambda kind, more: {"event": kind, **(more if isinstance(more, dict) else {})}, kinds, fields)
    fuzz(events | raw, refused_or_read(read_event))


def test_manifests_stay_inside(fuzz: Fuzz) -> None:
    names = st.sampled_from(["a", "b", "a/b", "a/b/c", "..", "../x", "/x", "", "a/..", ".corral-x", "ü", "\x1b"])
    rows = st.lists(st.builds(lambda path, target, kind: {**ROW, "path": path, "target": target, "kind": kind,
                    "size": 0}, names, names, st.sampled_from(["file", "link", "folder"])), max_size=5)  # fmt: skip

    def check(value: object) -> None:
        try:
            found = manifest.checked(value, links_out=False)
        except CourierError:
            return
        links = {row["path"] for row in found if row["kind"] == "link"}
        for row in found:
            assert ".." not in row["path"].split("/")
            assert not any(row["path"].startswith(f"{link}/") for link in links)
            assert row["kind"] != "link" or manifest.inner_target(row["path"], row["target"]) is not None

    fuzz(rows | changed([ROW]), check)


def test_journals(fuzz: Fuzz) -> None:
    def check(value: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "events.jsonl"
            path.write_bytes(text_of(value) + b"\n")
            for event in read_events(path):
                assert event.kind != "state" or isinstance(event.get("state"), str)

    fuzz(changed(EVENT) | raw, check)


def test_lines_of_a_gang(fuzz: Fuzz) -> None:
    def read(data: bytes) -> None:
        said = gang_connection._object(data)
        gang_connection.read_status(said)
        gang_connection.read_order(said)

    fuzz(changed(STANDING) | raw, refused_or_read(read, ValueError, RecursionError))


def test_configs_of_models(fuzz: Fuzz) -> None:
    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes(data)
            facts_from_folder(Path(folder))

    fuzz(changed(CONFIG) | raw, refused_or_read(read))


def test_recipes_of_models(fuzz: Fuzz) -> None:
    flags = shipped_flags()
    assert flags

    def read(data: bytes) -> None:
        recipe = recipe_for(["qwen3-8b", "x" * 200], "", [read_table(data, "x")])
        used = applied(recipe, [], {}, flags, tools=True)
        check_arguments([*used.api_arguments, *used.arguments], flags)
        assert all(name.startswith("VLLM_") and value.isascii() for name, value in used.environment.items())
        assert "\x1b" not in plain("".join(used.notes))

    fuzz(changed(RECIPES) | raw, refused_or_read(read))


def test_metrics_pages(fuzz: Fuzz) -> None:
    numbers = st.sampled_from(["1", "nan", "+Inf", "-1e400", "x", "", "1 2 3"])
    rows = st.builds(lambda label, number: f'vllm:num_requests_running{{a="{label}"}} {number}\n', st.text(), numbers)
    pages = st.lists(rows, max_size=5).map(lambda found: "".join(found).encode("utf-8", "replace"))
    fuzz(pages | raw, refused_or_read(lambda page: parse(page, 0.0)))


def test_weights(fuzz: Fuzz) -> None:
    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
            (Path(folder) / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
            facts_from_folder(Path(folder))

    header = {"a": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 0]}}
    fuzz(changed(header) | raw, refused_or_read(read))


@pytest.mark.parametrize("data", KEPT, ids=range(len(KEPT)))
def test_what_once_found_something(data: bytes) -> None:
    refused_or_read(lambda data: parse_json(data, "x"))(data)
    refused_or_read(read_event)(data)

"""The fake server: shapes, determinism, pace, capacity, faults, log."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from corral.base.errors import UsageError
from corral.fake import words
from corral.fake.app import FakeOptions
from corral.fake.faults import KINDS, FaultBook, parse_fault
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from tests.unit.conftest import Corral
from tests.until import until


def call(url: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """One request: status, JSON (or text), headers."""
    to = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    to.request("GET" if data is None else "POST", path, data, headers or {})
    answer = to.getresponse()
    raw = answer.read()
    to.close()
    try:
        return answer.status, json.loads(raw), answer.headers
    except ValueError:
        return answer.status, raw.decode("utf-8", "replace"), answer.headers


def ask(server: FakeServer, **body: Any) -> Any:
    body = {"prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0, **body}
    return call(server.url, "/v1/completions", body)[1]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(control=True)) as running:
        yield running


@pytest.mark.parametrize("text", ["San Francisco is a", "", "  two  spaces ", "é東京\n\tx", "🎉 party", "a" * 1000])
def test_tokenizer_gives_the_text_back(text: str) -> None:
    ids = words.encode(text.encode())
    assert words.decode(ids).decode() == text
    assert len(ids) == len(words.pieces(text.encode()))
    assert all(0 <= i < words.EOS for i in ids)


def test_tokenizer_knows_its_rule() -> None:
    assert words.pieces(b"San Francisco is a") == [b"San", b" Fra", b"ncis", b"co", b" is", b" a"]
    with pytest.raises(ValueError, match="out of vocabulary"):
        words.decode([words.EOS + 1])


def test_an_answer_tokenizes_to_its_own_tokens() -> None:
    for key in range(0, 2**64, 2**64 // 50):
        answer = words.answer(key, 300, None)
        assert [p.decode() for p in words.pieces(answer.text.encode())] == answer.texts
        assert words.answer(key, 10, None).texts == answer.texts[:10]
    assert words.answer(5, 70_000, None).count == 70_000


def test_paths_of_the_engine(server: FakeServer) -> None:
    assert call(server.url, "/health")[0] == 200
    assert call(server.url, "/version")[1] == {"version": "0.32.0"}
    card = call(server.url, "/v1/models")[1]["data"][0]
    assert (card["id"], card["max_model_len"]) == ("fake", 8192)
    tokens = call(server.url, "/tokenize", {"prompt": "San Francisco", "return_token_strs": True})[1]
    assert tokens["count"] == 4
    assert tokens["token_strs"] == ["San", " Fra", "ncis", "co"]
    assert call(server.url, "/detokenize", {"tokens": tokens["tokens"]})[1] == {"prompt": "San Francisco"}
    assert call(server.url, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})[1]["count"] > 2
    assert call(server.url, "/nowhere")[0] == 404
    assert call(server.url, "/v1/completions")[0] == 405


def test_completion_has_the_engines_fields(server: FakeServer) -> None:
    body = ask(server)
    assert list(body) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert list(body["choices"][0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
        "prompt_token_ids", "routed_experts",
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 6, "total_tokens": 13, "completion_tokens": 7,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip
    slow = ask(server, return_token_ids=True)  # the way through dictionaries
    assert list(slow) == list(body)
    assert list(slow["choices"][0]) == list(body["choices"][0])
    assert slow["choices"][0]["text"] == body["choices"][0]["text"]


def test_chat_has_the_engines_fields(server: FakeServer) -> None:
    ask_chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for extra in ({}, {"logprobs": True, "top_logprobs": 2}):
        body = call(server.url, "/v1/chat/completions", {**ask_chat, **extra})[1]
        assert list(body) == [
            "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
            "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params",
            "metrics",
        ]  # fmt: skip
        choice = body["choices"][0]
        assert list(choice) == [
            "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts",
        ]  # fmt: skip
        assert list(choice["message"]) == [
            "role", "content", "refusal", "annotations", "audio", "function_call", "reasoning",
        ]  # fmt: skip
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [len(c["top_logprobs"]) for c in content] == [2, 2, 2]


def test_streams_say_what_whole_answers_say(server: FakeServer) -> None:
    whole = ask(server, max_tokens=40, n=2, ignore_eos=True)
    body = {"prompt": "San Francisco is a", "max_tokens": 40, "temperature": 0, "n": 2, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(call(server.url, "/v1/completions", body | options)[1])
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 80
    texts = ["", ""]
    for chunk in chunks[:-2]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        assert list(choice) == [
            "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids",
        ]  # fmt: skip
    assert texts == [c["text"] for c in whole["choices"]]
    assert texts[0] != texts[1]


def test_chat_stream_begins_with_the_role(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True, "ignore_eos": True}
    chunks = events(call(server.url, "/v1/chat/completions", body)[1])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks[1:-1]] == [None, None, None, "length"]
    assert all("usage" not in c for c in chunks[:-1])


def test_answers_are_a_pure_function_of_the_request(server: FakeServer) -> None:
    first = ask(server)
    assert ask(server) == first
    assert ask(server, prompt="San Francisco is b") != first
    assert ask(server, seed=1) == first  # greedy: the seed changes nothing
    warm = ask(server, temperature=1, seed=1)["choices"][0]["text"]
    assert ask(server, temperature=1, seed=1)["choices"][0]["text"] == warm
    assert ask(server, temperature=1, seed=2)["choices"][0]["text"] != warm
    ids = words.encode(b"San Francisco is a")
    assert ask(server, prompt=ids) == first
    both = ask(server, prompt=["x y", "San Francisco is a"])["choices"]
    assert both[1]["text"] == first["choices"][0]["text"]
    with FakeServer() as other:
        assert ask(other) == first


def test_stop_strings_and_natural_ends(server: FakeServer) -> None:
    free = ask(server, max_tokens=200, ignore_eos=True)["choices"][0]["text"]
    cut = ask(server, max_tokens=200, ignore_eos=True, stop=["."])
    assert cut["choices"][0]["text"] == free[: free.index(".")]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", ".")
    assert cut["usage"]["completion_tokens"] < 200
    two = free[10:18]
    assert ask(server, max_tokens=200, ignore_eos=True, stop=two)["choices"][0]["text"] == free[: free.index(two)]
    ended = ask(server, max_tokens=2000)
    assert ended["choices"][0]["finish_reason"] == "stop"
    shown = len(words.pieces(ended["choices"][0]["text"].encode()))
    assert ended["usage"]["completion_tokens"] == shown + 1  # the end token counts, as in the engine


def test_log_probabilities_add_up(server: FakeServer) -> None:
    body = ask(server, logprobs=20, prompt_logprobs=1, echo=True)["choices"][0]
    log = body["logprobs"]
    assert "".join(log["tokens"]) == body["text"]
    assert log["text_offset"][:4] == [0, 3, 7, 11]
    assert log["token_logprobs"][0] is None
    assert all(len(top) in (20, 21) for top in log["top_logprobs"][1:])
    for token, logprob, top in zip(
        log["tokens"][1:], log["token_logprobs"][1:], log["top_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob
        assert sum(2.718281828**v for v in top.values()) < 1.0001
    assert body["prompt_logprobs"][0] is None
    entry = next(iter(body["prompt_logprobs"][1].values()))
    assert set(entry) == {"logprob", "rank", "decoded_token"}
    streamed = {"prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0, "logprobs": 20, "stream": True}
    chunks = events(call(server.url, "/v1/completions", streamed | {"echo": True})[1])[:-1]
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    assert joined == log


@pytest.mark.parametrize(
    ("body", "status", "words_"),
    [
        (b'{"model"', 400, "JSON decode error"),
        (b"[]", 400, "valid dictionary"),
        ({"prompt": "x", "model": "other"}, 404, "The model `other` does not exist."),
        (
            {"prompt": "word " * 9000},
            400,
            "maximum context length is 8192 tokens. However, your prompt contains 18000",
        ),
        ({"prompt": "x", "max_tokens": 9000}, 400, "max_tokens=9000 cannot be greater than max_model_len=8192"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ({"prompt": "x", "temperature": -1}, 400, "temperature must be in [0, 2], got -1."),
        ({"prompt": "x", "logprobs": 50}, 400, "greater than max allowed: 20"),
        ({"prompt": "x", "n": 0}, 400, "n must be at least 1"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [words.EOS + 9]}, 400, "out of vocabulary"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "Stream options"),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, "`prompt_logprobs` are not available"),
    ],
)
def test_refusals_use_the_engines_words(server: FakeServer, body: Any, status: int, words_: str) -> None:
    got, answer, _ = call(server.url, "/v1/completions", body)
    assert got == status
    assert words_ in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with FakeServer(FakeOptions(key_file=key)) as server:
        assert call(server.url, "/health")[0] == 200
        assert call(server.url, "/v1/models")[:2] == (401, {"error": "Unauthorized"})
        assert call(server.url, "/v1/models", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert call(server.url, "/v1/models", headers={"Authorization": "Bearer secret"})[0] == 200


def test_keep_alive_pipelining_and_split_requests(server: FakeServer) -> None:
    address = urlsplit(server.url)
    body = json.dumps({"prompt": "pipelined", "max_tokens": 2, "temperature": 0}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    chunked = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        len(body), body,
    )  # fmt: skip
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as to:
        to.sendall(one * 500)
        for byte in one[:60]:
            to.sendall(bytes([byte]))
        to.sendall(one[60:] + chunked + one.replace(b"Host: x", b"Connection: close"))
        data = b""
        while more := to.recv(65536):
            data += more
    assert data.count(b"HTTP/1.1 200 OK") == 503
    assert len(set(data.split(b"HTTP/1.1 ")[1:])) == 1


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pace_and_the_log_of_true_times(tmp_path: Path) -> None:
    pace = Pace(ttft_s=0.05, itl_s=0.01, prefill_tokens_per_s=1000)
    with FakeServer(FakeOptions(pace=pace, log=tmp_path / "log", prefix_cache=False)) as server:
        for stream in (True, False):
            call(server.url, "/v1/completions", {"prompt": "x " * 20, "max_tokens": 11, "stream": stream})
    streamed, whole = rows(tmp_path / "log")
    assert (streamed["stream"], whole["stream"]) == (True, False)
    for row in (streamed, whole):
        assert row["completion_tokens"] == 11
        assert row["prompt_tokens"] == 21
        assert (row["first_ns"] - row["arrival_ns"]) / 1e9 >= 0.070  # exactly: test_fake_pace.py
        assert row["last_ns"] > row["first_ns"]


def test_a_full_cache_preempts(tmp_path: Path) -> None:
    with FakeServer(FakeOptions(pace=Pace(itl_s=0.02, kv_tokens=60), log=tmp_path / "log")) as server:
        body = {"prompt": "San Francisco is a", "max_tokens": 40, "ignore_eos": True}
        clients = [http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60) for _ in range(3)]
        for client in clients:
            client.connect()
        for client in clients:
            client.request("POST", "/v1/completions", json.dumps(body))
        for client in clients:
            assert client.getresponse().read()
            client.close()
        page = call(server.url, "/metrics")[1]
    assert len(rows(tmp_path / "log")) == 3
    line = next(x for x in page.splitlines() if x.startswith("vllm:num_preemptions_total"))
    assert float(line.split()[-1]) >= 1
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.0' in page


def test_metrics_count() -> None:
    with FakeServer() as server:
        long = "word " * 100
        for _ in range(2):
            ask(server, prompt=long, max_tokens=5)
        page = call(server.url, "/metrics")[1]
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in page.splitlines() if line[0] != "#"}
    labels = '{engine="0",model_name="fake"}'
    assert values["vllm:generation_tokens_total" + labels] == 10
    assert values["vllm:prompt_tokens_total" + labels] == values["vllm:prefix_cache_queries_total" + labels] == 400
    assert values["vllm:prefix_cache_hits_total" + labels] == 112
    assert values["vllm:time_to_first_token_seconds_count" + labels] == 2
    assert values["vllm:inter_token_latency_seconds_count" + labels] == 8
    assert any(name.startswith("vllm:cache_config_info{block_size=") for name in values)


def raw(server: FakeServer, silent_s: float = 60, **body: Any) -> tuple[bytes, bool]:
    """All bytes of one answer, and whether the connection was reset; after `silent_s` without any it hangs."""
    address = urlsplit(server.url)
    data = json.dumps({"prompt": "San Francisco is a", "max_tokens": 8, "ignore_eos": True, **body}).encode()
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=silent_s) as to:
        to.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        got = b""
        try:
            while more := to.recv(65536):
                got += more
                if got.endswith((b"0\r\n\r\n", b'"metrics":null}')):
                    return got, False
        except ConnectionResetError:
            return got, True
        except TimeoutError:
            return got + b"<hangs>", False
    return got + b"<eof>", False


def test_faults_of_single_requests(server: FakeServer) -> None:
    server.set_faults("status:code=429,retry_after=1.5")
    status, body, headers = call(server.url, "/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, 429, "1.5")
    server.set_faults("reset")
    assert raw(server) == (b"", True)
    server.set_faults("reset:when=mid")
    got, was_reset = raw(server, stream=True)
    assert was_reset
    assert 0 < got.count(b"data: {") < 8
    assert raw(server)[1]
    server.set_faults("cut")
    got, _ = raw(server, stream=True)
    assert got.endswith(b"<eof>")
    assert got.count(b"data: {") == 4
    assert raw(server)[0].endswith(b"<eof>")
    server.set_faults("cut:clean=1,at=2")
    got, _ = raw(server, stream=True)
    assert got.endswith(b"0\r\n\r\n")
    assert got.count(b"data: {") == 2
    assert b"[DONE]" not in got
    server.set_faults("error")
    got, _ = raw(server, stream=True)
    assert b'{"error":{"message":"Internal server error"' in got
    assert b"[DONE]" in got
    assert call(server.url, "/v1/completions", {"prompt": "x"})[0] == 500
    server.set_faults("abort:at=3")
    got, _ = raw(server, stream=True)
    assert b'"finish_reason":"abort"' in got
    assert ask(server)["choices"][0]["finish_reason"] == "abort"
    server.set_faults("hang")
    assert raw(server, silent_s=1)[0] == b"<hangs>"
    server.set_faults("hang:when=mid")
    got, _ = raw(server, silent_s=2, stream=True)
    assert got.endswith(b"<hangs>")
    assert got.count(b"data: {") == 4
    server.set_faults("garbage")
    with pytest.raises(ValueError):
        events(call(server.url, "/v1/completions", {"prompt": "x", "stream": True})[1])
    assert isinstance(call(server.url, "/v1/completions", {"prompt": "x"})[1], str)
    server.set_faults("zero")
    assert ask(server)["usage"]["completion_tokens"] == 0
    assert raw(server, stream=True)[0].count(b"data: {") == 1
    server.set_faults("length:factor=0.5")
    assert ask(server, max_tokens=8)["usage"]["completion_tokens"] == 4
    server.set_faults("split:bytes=3")
    assert ask(server)["usage"]["completion_tokens"] == 7
    server.set_faults("health")
    assert call(server.url, "/health")[0] == 503
    server.set_faults()
    assert call(server.url, "/health")[0] == 200


def test_control_changes_faults(server: FakeServer) -> None:
    status, body, _ = call(server.url, "/control/faults", {"faults": ["status:code=503,times=1"]})
    assert (status, body["faults"]) == (200, [{"fault": "status:times=1,code=503", "fired": 0}])
    assert [call(server.url, "/v1/completions", {"prompt": "x"})[0] for _ in range(2)] == [503, 200]
    assert call(server.url, "/control/faults")[1]["faults"][0]["fired"] == 1
    assert call(server.url, "/control/faults", {"faults": ["statsu"]})[0] == 400
    assert call(server.url, "/control/pace", {"itl_s": 0.0})[1]["itl_s"] == 0
    assert call(server.url, "/control/pace", {"bad": 1})[0] == 400
    assert call(server.url, "/control/faults", {"faults": []})[0] == 200
    with FakeServer() as closed:
        assert call(closed.url, "/control/faults", {"faults": []})[0] == 404


def test_which_requests_a_fault_hits() -> None:
    def hits(spec: str, count: int = 10, content: int = 0) -> list[int]:
        book = FaultBook(seed=7)
        book.set([parse_fault(spec)])
        chosen = [(n, book.choose(n, content or n, b"prompt %d" % n)) for n in range(1, count + 1)]
        return [n for n, fault in chosen if fault]

    assert hits("status:every=3") == [3, 6, 9]
    assert hits("status:after=8") == [9, 10]
    assert hits("status:first=2") == [1, 2]
    assert hits("status:match=prompt 1") == [1, 10]
    assert hits("status:times=2,every=2") == [2, 4]
    assert hits("status:per=2", content=1) == [1, 2]
    some = hits("status:p=0.1", 2000)
    assert 150 < len(some) < 250
    assert some == hits("status:p=0.1", 2000)
    assert {len(hits(f"status:p=0.5,after={n}", 60, content=1)) for n in range(20)} == {0}  # drawn by content …
    struck = [len(hits("status:p=0.5", 60, content=c)) for c in range(1, 200)]
    assert 60 < sum(n > 0 for n in struck) < 140
    assert max(struck) < 20  # … and a retry of what was struck is drawn anew


def test_unknown_faults_name_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no fault 'statsu'") as failed:
        parse_fault("statsu")
    assert "Did you mean 'status'" in failed.value.remedy
    with pytest.raises(UsageError, match="no setting 'cod'"):
        parse_fault("status:cod=1")
    with pytest.raises(UsageError, match="cannot be read"):
        parse_fault("status:code=x")
    for kind in KINDS:
        assert parse_fault(parse_fault(f"{kind}:p=0.5,at=3").spec()) == parse_fault(f"{kind}:p=0.5,at=3")


def healthy(server: FakeServer) -> bool:
    try:
        return bool(call(server.url, "/health")[0] == 200)
    except OSError:
        return False


def test_flapping_refuses_then_serves_again() -> None:
    with FakeServer(FakeOptions(faults=(parse_fault("flap:down=0.2,period=0.3"),))) as server:
        seen: set[bool] = set()
        deadline = time.monotonic() + 60
        while seen != {True, False} and time.monotonic() < deadline:
            seen.add(healthy(server))
            time.sleep(0.02)
        assert seen == {True, False}
        server.set_faults()
        while not healthy(server) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert healthy(server)


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    with FakeServer(FakeOptions(pace=Pace(itl_s=1.0, max_seqs=1), log=tmp_path / "log")) as server:
        address = urlsplit(server.url)
        data = json.dumps({"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True}).encode()
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as to:
            to.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            to.recv(10)
        ask(server, max_tokens=1)  # the other one would have held it for a quarter of an hour
    assert sorted(r["finish"] for r in rows(tmp_path / "log")) == ["gone", "length"]


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "corral", "fake-server", "--until-eof", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    ready = json.loads(process.stdout.readline())
    assert ready["pid"] == process.pid
    return process, ready["url"]


@pytest.mark.parametrize("code", [0, 1])
def test_the_process_can_die_on_demand(code: int) -> None:
    process, url = start("--fault", f"die:code={code},after=1")
    with process:
        assert call(url, "/v1/completions", {"prompt": "x"})[0] == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            call(url, "/v1/completions", {"prompt": "x"})
        assert process.wait(120) == code


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (None, 0)])
def test_the_process_ends_when_asked(how: signal.Signals | None, code: int) -> None:
    process, url = start("--ttft-ms", "1", "--no-uvloop")
    with process:
        assert call(url, "/v1/completions", {"prompt": "x"})[0] == 200
        if how is None:
            assert process.stdin
            process.stdin.close()
        else:
            os.kill(process.pid, how)
        assert process.wait(120) == code


def test_a_taken_port_is_named() -> None:
    with FakeServer() as server:
        port = urlsplit(server.url).port
        command = [sys.executable, "-m", "corral", "fake-server", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 4
    assert f"127.0.0.1:{port}" in done.stderr


def test_without_uvloop_in_a_thread() -> None:
    with FakeServer(FakeOptions(uvloop=False, pace=Pace(itl_s=0.001))) as server:
        assert ask(server)["usage"]["completion_tokens"] == 7


def test_the_official_sdk_reads_it(server: FakeServer) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["fake"]
        ask_ = {"model": "fake", "prompt": "San Francisco is a", "max_tokens": 9, "temperature": 0}
        whole = client.completions.create(**ask_, logprobs=2)
        streamed = list(client.completions.create(**ask_, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].text for c in streamed if c.choices) == whole.choices[0].text
        assert streamed[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": None, "completion_tokens_details": None}
        )
        assert len(whole.choices[0].logprobs.tokens) == 9
        talk = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "n": 2}
        chat = client.chat.completions.create(**talk, logprobs=True, top_logprobs=3)
        assert len(chat.choices[1].logprobs.content[0].top_logprobs) == 3
        pieces = ["", ""]
        for chunk in client.chat.completions.create(**talk, stream=True):
            pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert pieces == [c.message.content for c in chat.choices]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_scripted_calls_of_tools_follow_the_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 3, then 5 + 5"}], "tools": tools}
    calls = (("add", '{"a": 2, "b": 3}'), ("add", '{"a": 5, "b": 5}'))
    with FakeServer(FakeOptions(tool_calls=calls)) as server:
        for _, arguments in calls:
            choice = call(server.url, "/v1/chat/completions", chat)[1]["choices"][0]
            (asked,) = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert asked["function"] == {"name": "add", "arguments": arguments}
            pieces = events(call(server.url, "/v1/chat/completions", {**chat, "stream": True})[1])[:-1]
            deltas = [piece["choices"][0]["delta"].get("tool_calls") for piece in pieces]
            streamed = [delta[0] for delta in deltas if delta]
            assert streamed[0]["id"] == asked["id"]
            assert [part["function"].get("name") for part in streamed] == ["add", *[None] * (len(streamed) - 1)]
            assert "".join(part["function"]["arguments"] for part in streamed) == arguments
            assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
            chat["messages"] += [choice["message"], {"role": "tool", "tool_call_id": asked["id"], "content": "5"}]
        for last in (chat, {**chat, "messages": chat["messages"][:1], "tool_choice": "none"}):
            said = call(server.url, "/v1/chat/completions", last)[1]["choices"][0]
            assert said["message"]["content"]
            assert not said["message"].get("tool_calls")


def test_a_scripted_call_that_cannot_be_read_is_refused(corral: Corral) -> None:
    done = corral("fake-server", "--tool-call", "add=2")
    assert done.code == 2
    assert "--tool-call 'add=2' cannot be used." in done.err


def test_tokens_are_counted_at_each_step_of_an_answer() -> None:
    def generated(server: FakeServer) -> float:
        page = call(server.url, "/metrics")[1]
        return float(next(x for x in page.splitlines() if x.startswith("vllm:generation_tokens_total")).split()[-1])

    with FakeServer(FakeOptions(pace=Pace(itl_s=0.05))) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        connection.getresponse().readline()
        until(lambda: 0 < generated(server) < 1000)
        connection.close()

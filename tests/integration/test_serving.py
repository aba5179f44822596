"""One real server, used in every way: completions, chat, streams, log-probabilities, the key, closed doors.

At last its engine is killed.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

import corral as library
from corral.node.guard import OPEN_WITHOUT_KEY
from corral.node.processes import descendants, marked
from corral.use.llm.llm import LLM
from tests.integration.conftest import FAST, Corral
from tests.integration.endings import failed, nothing_left
from tests.integration.transformers_scores import planned_dtype, quieten, reference, rows, worst_difference
from tests.tiny_llama import make_tiny_llama

ORIGIN = "https://chat.example.org"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


@pytest.fixture(scope="module")
def quiet_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = quieten(make_tiny_llama(tmp_path_factory.mktemp("quiet") / "tiny", dtype="bfloat16"))
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    config["chat_template"] += "{# calls: <tool_call> #}"  # a template that names the form of its model's calls
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(corral: Corral, quiet_model: Path) -> Iterator[dict[str, Any]]:
    document = corral.json(
        "up", str(quiet_model), "--name", "serving", *FAST, "--allowed-origins", ORIGIN, "--store-responses"
    )
    yield document
    corral.run("down", "serving", check=False)


@pytest.fixture(scope="module")
def key(server: dict[str, Any]) -> str:
    return Path(server["endpoint"]["key_file"]).read_text().strip()


@pytest.fixture(scope="module")
def client(server: dict[str, Any], key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server["endpoint"]["base_url"], api_key=key, max_retries=0) as found:
        yield found


def call(server: dict[str, Any], method: str, path: str, key: str | None, body: Any = None) -> tuple[int, str]:
    address = urlsplit(server["endpoint"]["base_url"])
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_the_document_of_up(server: dict[str, Any]) -> None:
    assert server["state"] == "ready"
    assert server["endpoint"]["model"] == "tiny"
    assert server["timings"]["engine_ready_s"] > 1
    assert server["observed"]["kv_tokens"] > 0


def test_complete(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="San Francisco is a", max_tokens=7, temperature=0)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 7
    again = client.completions.create(model="tiny", prompt="San Francisco is a", max_tokens=7, temperature=0)
    assert reply.choices[0].text == again.choices[0].text


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
    )
    assert reply.choices[0].finish_reason == "length"


def test_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=0, stream=True)
    pieces = [piece.choices[0].text for piece in stream if piece.choices]
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=0)
    assert len(pieces) >= 2
    assert "".join(pieces) == whole.choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=3, temperature=0, logprobs=2, extra_body={"prompt_logprobs": 1}
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    prompt_logprobs = reply.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert prompt_logprobs[0] is None
    assert len(prompt_logprobs) == len("Hello")


def test_models_are_listed_by_the_name_people_say(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_tools_are_taken_in_every_form(client: openai.OpenAI) -> None:
    choices: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "add"}}]
    for choice in choices:
        asked: list[Any] = [{"role": "user", "content": "Add 1."}]
        answer = client.chat.completions.create(
            model="tiny", messages=asked, tools=TOOLS, tool_choice=choice, max_tokens=24, temperature=0
        )
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), choice


def test_a_response_is_continued_and_every_answer_has_an_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="Hello", max_output_tokens=8)
    assert first._request_id
    second = client.responses.create(model="tiny", input="More", previous_response_id=first.id, max_output_tokens=8)
    assert second.previous_response_id == first.id
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_path_that_the_model_lacks_is_an_error_with_a_sentence(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"has no path /v1/embeddings; it has: .*/v1/chat"):
        client.embeddings.create(model="tiny", input="x")


def test_pages_of_the_named_origin_may_ask_and_no_others(server: dict[str, Any], key: str) -> None:
    address = urlsplit(server["endpoint"]["base_url"])
    for origin, status, allowed in ((ORIGIN, 200, ORIGIN), ("https://evil.example.org", 401, None)):
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", "/v1/chat/completions", headers=asked)
        response = connection.getresponse()
        assert (response.status, response.headers.get("access-control-allow-origin")) == (status, allowed)
        connection.close()
    assert json.loads(call(server, "GET", "/tokenizer_info", key)[1])["tokenizer_class"]


def test_the_wrong_key_is_refused(server: dict[str, Any]) -> None:
    wrong = openai.OpenAI(base_url=server["endpoint"]["base_url"], api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def routes(corral: Corral) -> list[str]:
    """Every path that this vLLM's source registers, found in the installed engine itself."""
    import re

    site = next(corral.engine.glob("lib/python3.*")) / "site-packages" / "vllm"
    found = set()
    for path in (site / "entrypoints").rglob("*.py"):
        text = path.read_text(errors="replace")
        found |= set(re.findall(r"@(?:router|app)\.(?:get|post|put|delete|websocket)\(\s*\"(/[^\"]*)\"", text))
    return sorted(found)


def test_every_path_of_the_engine_needs_the_key(corral: Corral, server: dict[str, Any]) -> None:
    paths = routes(corral)
    assert len(paths) > 40
    for path in paths:
        if path in OPEN_WITHOUT_KEY:
            continue
        for method in ("GET", "POST"):
            status, _ = call(server, method, path, None, {})
            assert status == 401, f"{method} {path} answered {status} without a key"
    assert call(server, "GET", "/health", None)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/collective_rpc", "/pause", "/resume", "/invocations", "/reset_prefix_cache",
     "/server_info", "/update_weights", "/start_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
     "/scale_elastic_ep", "/abort_requests", "/docs", "/openapi.json"],
)  # fmt: skip
def test_administrative_paths_are_closed_even_with_the_key(server: dict[str, Any], key: str, path: str) -> None:
    for method in ("GET", "POST"):
        assert call(server, method, path, key, {})[0] == 403


def test_the_key_is_nowhere_but_in_its_file(corral: Corral, server: dict[str, Any], key: str) -> None:
    record = json.loads((corral.home / "deployments/serving/deployment.json").read_text())
    processes = marked(record["launch_id"])
    assert processes
    for pid in processes:
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    for path in (corral.home / "deployments/serving").rglob("*"):
        if path.is_file() and path.name != "key":
            assert key not in path.read_text(errors="replace")
            assert path.stat().st_mode & 0o077 == 0


def test_it_listens_on_loopback_only(server: dict[str, Any]) -> None:
    port = urlsplit(server["endpoint"]["base_url"]).port
    assert port is not None
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert [address for address in listening if int(address.split(":")[1], 16) == port] == [f"0100007F:{port:04X}"]


def test_bench_measures_it_with_exact_lengths(corral: Corral, server: dict[str, Any], key: str) -> None:
    done = corral.run("bench", "run", "--deployment", "serving", "--concurrency", "4", "--num-prompts", "24",
                      "--input-len", "20", "--output-len", "8", "--percentiles", "50", "--json", "--name", "real",
                      check=False)  # fmt: skip
    body = json.loads(done.stdout)
    assert body["completed"] == 24, body
    assert body["total_output_tokens"] == 24 * 8
    assert body["total_input_tokens"] == 24 * 20
    kinds = {problem["kind"] for problem in body["problems"]}
    assert kinds <= {"generator_lag", "warm_up"}, body["problems"]  # true on a busy machine
    known = corral.json("bench", "report", "real")
    assert known["server"]["generation_tokens"] == 24 * 8
    assert known["server"]["prefix_hit_share"] == pytest.approx(0.0, abs=0.05)
    assert known["fingerprint"]["server"]["deployment"] == "serving"
    assert known["limit"]["limited_by"]
    for path in (corral.home / "bench" / "real").iterdir():
        assert key not in path.read_text()


def test_scores_are_those_of_transformers(corral: Corral, server: dict[str, Any], quiet_model: Path) -> None:
    dtype = planned_dtype(corral.home, "serving")
    told = server["endpoint"]
    with LLM(library.Endpoint(told["base_url"], told["model"], told["key_file"])) as llm:
        worst = worst_difference(llm, reference(corral, quiet_model, dtype, rows()), rows())
    print(f"stored in bfloat16, served in {dtype}: largest difference {worst:.2e}")
    assert worst < (1e-4 if dtype == "float32" else 1e-2)


def test_kill_9_of_the_engine(corral: Corral, server: dict[str, Any]) -> None:
    engine = json.loads(corral.run("events", "serving", "--json").stdout.splitlines()[0])["pid"]
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(engine)}
    (core,) = [pid for pid, name in names.items() if name.startswith(b"VLLM::EngineCore")]
    os.kill(core, signal.SIGKILL)  # vLLM's server then exits by itself, with code 0
    assert failed(corral, "serving")["reason"] == "engine_exited"
    nothing_left(corral, "serving")

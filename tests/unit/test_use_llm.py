"""The Python face against the fake server: every method, in order, with its errors; and the public surface."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import corral
from corral.base.errors import UsageError
from corral.client.client import run
from corral.client.errors import BadRequestError, CutStreamError, PromptTooLongError, RequestError, ServerGoneError
from corral.fake.app import FakeOptions
from corral.fake.faults import parse_fault
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.use.llm.llm import LLM, AsyncLLM, request_for


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(FakeOptions(max_model_len=512)) as running:
        yield running


@pytest.fixture
def llm(server: FakeServer) -> Iterator[LLM]:
    with corral.connect(url=server.url) as connected:
        yield connected
    server.set_faults()


def test_vectors_and_rankings_keep_the_order_of_what_was_asked(llm: LLM) -> None:
    texts = [f"text {n}" for n in range(600)]  # several requests
    rows = llm.embed(texts)
    assert len(rows) == 600
    assert rows[417] == llm.embed("text 417")[0]
    assert len(llm.embed(["a"], dimensions=4)[0]) == 4
    documents = ["cheese is made of milk", "Paris is the capital of France", "rain"]
    ranked = llm.rerank("the capital of France", documents, top_n=2)
    assert (ranked[0].index, ranked[0].document) == (1, documents[1])
    assert len(ranked) == 2
    assert ranked[0].score > ranked[1].score
    with pytest.raises(PromptTooLongError):
        llm.embed(["word " * 2000])


def test_the_public_surface() -> None:
    assert corral.__all__ == [
        "LLM", "AsyncLLM", "CorralError", "Endpoint", "Piece", "Plan", "Reply", "RequestError", "Score",
        "ScoreOptions", "Scores", "Token", "TokenView", "__version__", "batch", "connect", "plan", "up",
    ]  # fmt: skip
    for name in corral.__all__:
        assert getattr(corral, name) is not None
    assert dir(corral) == sorted(corral.__all__)
    with pytest.raises(AttributeError):
        corral.nothing  # noqa: B018


def test_importing_corral_is_quick() -> None:
    heavy = ("msgspec", "click", "rich", "asyncio", "corral.use.llm.llm")
    code = f"import sys, corral; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_faces_have_the_same_methods() -> None:
    def face(cls: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(cls, inspect.isfunction)
        return {n: list(inspect.signature(m).parameters) for n, m in methods if not n.startswith("_")}

    sync, asynchronous = face(LLM), face(AsyncLLM)
    assert set(asynchronous) - set(sync) == {"explained"}
    assert {name: sync[name] for name in sync if name in asynchronous} == {
        name: asynchronous[name] for name in asynchronous if name in sync
    }


def test_what_is_no_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(corral.CorralError, match="one string was given"):
        llm.map("hello")
    with pytest.raises(corral.CorralError, match="one string was given"):
        llm.replies("hello")
    with pytest.raises(corral.CorralError, match="a prompt cannot be 5"):
        llm.complete(5)  # type: ignore[arg-type]


def test_complete_and_chat(llm: LLM) -> None:
    reply = llm.complete("San Francisco is a", max_tokens=7, temperature=0)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 7
    assert (
        llm.chat("Capital of France?", max_tokens=5).text
        == llm.chat([{"role": "user", "content": "Capital of France?"}], max_tokens=5).text
    )
    assert len(llm.complete("a", n=3, max_tokens=4).texts) == 3


def test_tokens_are_typed(llm: LLM) -> None:
    reply = llm.complete("San Francisco is a", logprobs=5, prompt_logprobs=1, max_tokens=4)
    assert [type(token) for token in reply.tokens] == [corral.Token] * 4
    assert all(token.id is not None for token in reply.tokens)
    assert len(reply.prompt_tokens) == 6
    assert reply.tokens[0].top[0].logprob is not None


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    ids = llm.tokenize("San Francisco is a")
    assert llm.complete(ids, max_tokens=3).usage.prompt_tokens == len(ids) == 6  # type: ignore[union-attr]


def test_streams(llm: LLM) -> None:
    stream = llm.stream("San", max_tokens=8)
    text = "".join(piece.text for piece in stream)
    assert stream.reply is not None
    assert stream.reply.text == text
    assert stream.reply.usage is not None
    chat = llm.stream([{"role": "user", "content": "hi"}], max_tokens=8)
    assert "".join(piece.text for piece in chat) == chat.reply.text  # type: ignore[union-attr]
    first = next(iter(broken := llm.stream("San", max_tokens=100)))
    broken.close()
    assert first.text


def test_map_is_in_order_and_complete(llm: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(300)]
    texts = llm.map(prompts, max_tokens=5, temperature=0, concurrency=64)
    assert texts[:3] == [llm.complete(p, max_tokens=5, temperature=0).text for p in prompts[:3]]
    assert len(texts) == 300
    assert texts[-1] == llm.complete(prompts[-1], max_tokens=5, temperature=0).text
    assert llm.map([]) == []
    seen: list[int] = []
    llm.map(prompts[:10], max_tokens=1, on_done=seen.append)
    assert seen == list(range(1, 11))
    chats = llm.map([[{"role": "user", "content": "hi"}], "text"], max_tokens=3)
    assert chats[0] == llm.chat("hi", max_tokens=3).text


def test_map_tries_again_what_can_mend(server: FakeServer, llm: LLM) -> None:
    server.set_faults("status:code=503,retry_after=0,per=1,match=mend")
    texts = llm.map([f"mend {i}" for i in range(20)], max_tokens=2)
    assert len(texts) == 20


def test_map_raises_the_first_error_and_replies_keep_it(server: FakeServer, llm: LLM) -> None:
    prompts = ["fine", "x" * 5000, "fine too"]
    with pytest.raises(PromptTooLongError):
        llm.map(prompts, max_tokens=2)
    found = llm.replies(prompts, max_tokens=2)
    assert isinstance(found[1], PromptTooLongError)
    assert not isinstance(found[0], RequestError)
    assert found[0].text
    server.set_faults("cut:match=never")
    with pytest.raises(CutStreamError):
        llm.map(["never"], retries=0, max_tokens=50)


def test_wrong_values_are_refused_before_sending(llm: LLM) -> None:
    with pytest.raises(UsageError, match="temperature"):
        llm.complete("a", temperature=3)
    with pytest.raises(UsageError, match="max_token"):
        llm.complete("a", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError):
        llm.complete([1.5])  # type: ignore[list-item]


def test_the_servers_refusals_have_their_own_errors(server: FakeServer, llm: LLM) -> None:
    with pytest.raises(BadRequestError):
        llm.complete("a", logprobs=21)  # more than the server allows
    gone = LLM(corral.Endpoint("http://127.0.0.1:9", "m"))
    with pytest.raises(ServerGoneError):
        gone.complete("a")


def test_the_async_face(server: FakeServer) -> None:
    async def main() -> None:
        async with corral.connect(url=server.url).aio as llm:
            one, two = await asyncio.gather(llm.complete("a", max_tokens=3), llm.chat("b", max_tokens=3))
            assert one.text
            assert two.text
            stream = llm.stream("San", max_tokens=6)
            text = "".join([piece.text async for piece in stream])
            assert stream.reply is not None
            assert stream.reply.text == text
            assert len(await llm.map(["a", "b"], max_tokens=2)) == 2
            assert (await llm.metrics()).running is not None
            assert (await llm.score([{"text": "the quick brown fox"}]))[0].tokens > 1
            async with llm.openai() as client:
                answer = await client.completions.create(model="fake", prompt="a", max_tokens=2)
            assert answer.choices[0].text

    run(main())


def test_the_sync_face_inside_a_running_loop_and_in_threads(server: FakeServer) -> None:
    async def cell() -> str:
        with corral.connect(url=server.url) as llm:  # as in a notebook
            return llm.complete("a", max_tokens=3).text

    assert asyncio.run(cell())
    with corral.connect(url=server.url) as llm:
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(llm.complete("a", max_tokens=3).text)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 8


def test_explain_and_metrics(llm: LLM) -> None:
    view = llm.explain("San Francisco", max_tokens=3)
    assert len(view.tokens) == 3
    assert view.prompt_tokens[0].text == "San"
    assert all(token.bytes is not None for token in view.tokens)
    reading = llm.metrics()
    assert reading.running == 0
    assert reading.generated_tokens


def test_the_sdk(llm: LLM) -> None:
    with llm.openai() as client:
        assert client.completions.create(model="fake", prompt="a", max_tokens=2).choices[0].text


def test_ctrl_c_in_map_is_clean(tmp_path: Path) -> None:
    code = (
        "import corral, os, signal, threading\n"
        "from corral.fake.app import FakeOptions\n"
        "from corral.fake.pace import Pace\n"
        "from corral.fake.server import FakeServer\n"
        "with FakeServer(FakeOptions(pace=Pace(ttft_s=30))) as server, corral.connect(url=server.url) as llm:\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    try:\n"
        "        llm.map(['a'] * 500)\n"
        "    except KeyboardInterrupt:\n"
        "        print('clean')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("clean", "", 0)


def test_requests_for_prompts() -> None:
    assert request_for("a", {})[1]["max_tokens"] == 256
    assert "max_tokens" not in request_for([{"role": "user", "content": "a"}], {})[1]
    assert request_for("a", {"logprobs": 0})[1]["return_token_ids"] is True


def test_score_from_python() -> None:
    pace = Pace(ttft_s=0.001)
    with FakeServer(FakeOptions(pace=pace)) as server, corral.connect(url=server.url) as llm:
        rows = [{"id": i, "text": f"row {i} has some words"} for i in range(20)]
        scores = llm.score([*rows, {"text": ""}, {"context": "a b ", "choices": ["c", "d"], "answer": 0}])
        assert [score.id for score in scores[:3]] == ["0", "1", "2"]
        assert len(scores) == 21
        assert [bad.number for bad in scores.bad] == [21]
        frame = scores.to_pandas()
        assert list(frame["tokens"])[:2] == [scores[0].tokens, scores[1].tokens]
        assert scores.summary()["rows"] == 21
        with pytest.raises(TypeError):
            llm.score(rows, colour="red")


def test_faults_have_names() -> None:
    assert parse_fault("cut")  # the fixtures above rely on it

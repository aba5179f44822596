"""The verbs as a user types them: output, exit codes, a chat in a real terminal."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.base.errors import DataError, UsageError
from corral.client.sampling import PARAMETERS, STRUCTURED
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.use.llm.conversation import COMMANDS, Conversation
from tests.unit.conftest import Corral, in_this_process
from tests.until import until

COMMAND = [sys.executable, "-m", "corral"]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def corral(server: FakeServer | None, *arguments: str, given: str = "") -> Done:
    """Run a command in this process, as its own would: arguments, environment, standard streams, exit code."""
    with pytest.MonkeyPatch.context() as patch:
        if server:
            patch.setenv("OPENAI_BASE_URL", server.url)
        told = in_this_process(*arguments, given=given)
    return Done(told.code, told.out, told.err)


def test_complete(server: FakeServer, tmp_path: Path) -> None:
    done = corral(server, "complete", "San Francisco is a", "--max-tokens", "7", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 7
    path = tmp_path / "prompt.txt"
    path.write_text("San Francisco is a")
    for arguments, given in (
        (["-f", str(path)], ""),
        (["-f", "-"], "San Francisco is a"),
        ([], "San Francisco is a"),
    ):
        again = corral(server, "complete", *arguments, "--max-tokens", "7", "--temperature", "0", given=given)
        assert again.stdout == done.stdout
    several = corral(server, "complete", "San", "-n", "3", "--max-tokens", "2")
    assert len(several.stdout.splitlines()) == 3


def test_an_answer_of_a_schema_is_checked(tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}')
    with FakeServer() as json_server:
        done = corral(json_server, "complete", "A person:", "--schema", str(schema))
        assert (done.returncode, json.loads(done.stdout)) == (0, {"age": 42})
        cut = corral(json_server, "complete", "A person:", "--schema", str(schema), "--max-tokens", "2")
        assert (cut.returncode, "cut at 2 tokens" in cut.stderr) == (7, True)
        both = corral(json_server, "complete", "A person:", "--schema", str(schema), "--regex", "x")
        assert (both.returncode, "--schema and --regex" in both.stderr) == (2, True)
    with FakeServer(FakeOptions(answer="no JSON")) as words_server:
        for more in ((), ("--json",), ("-n", "2"), ("--logprobs", "1")):
            refused = corral(words_server, "complete", "A person:", "--schema", str(schema), *more)
            assert (refused.returncode, "the answer is not JSON" in refused.stderr) == (7, True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[1]", "is not an object"),
        ('{"age": 3}', "none of the keywords"),
        ("{}", "none of the keywords"),
        ('{"type": "int"}', "type is 'int'"),
        ('{"type": "object", "properties": ["age"]}', "properties is no object"),
        ('{"properties": {"a": {"items": {"type": 3}}}}', "properties.a.items.type is 3"),
        ('{"type": "object", "required": "age"}', "required is no list"),
        ('{"anyOf": [{"type": "string"}, 3]}', "anyOf[1] is no schema"),
        ('{"enum": 3}', "enum is no list"),
        ("[" * 1000, "nested|not valid"),
    ],
)
def test_what_is_no_schema_is_refused_before_anything_is_sent(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "s.json").write_text(text)
    done = corral(None, "complete", "x", "--url", "http://127.0.0.1:9", "--schema", str(tmp_path / "s.json"))
    assert done.returncode == 10
    assert any(part in done.stderr.replace("\n", " ") for part in problem.split("|"))


def test_json_is_the_servers_own_response(server: FakeServer) -> None:
    done = corral(server, "complete", "San", "--json", "--logprobs", "2", "--max-tokens", "3", "--seed", "1")
    import urllib.request

    body = json.dumps({"model": "fake", "prompt": "San", "max_tokens": 3, "logprobs": 2, "seed": 1}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert json.loads(done.stdout) == json.loads(answer.read())


def test_the_table_of_tokens(server: FakeServer) -> None:
    done = corral(
        server, "complete", "San Francisco is a", "--logprobs", "2", "--prompt-logprobs", "1", "--max-tokens", "3"
    )
    assert done.returncode == 0
    text = done.stdout.splitlines()
    assert text[2] == "prompt"
    assert re.search(r"1 +·Fra +\d+ +[\d.e-]+% +-\d+\.\d+ +\d+", text[5])
    assert "\x1b" not in done.stdout


def test_several_answers_with_their_tokens(server: FakeServer) -> None:
    done = corral(server, "complete", "a", "-n", "2", "--logprobs", "1", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert "[1]" in done.stderr
    assert "[2]" in done.stderr
    assert done.stdout.count("PROBABILITY") == 2


def test_a_chat_shows_the_probabilities_it_was_asked_for(server: FakeServer) -> None:
    done = corral(server, "chat", "--logprobs", "1", "--max-tokens", "3", given="hello\n/exit\nnever read\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PROBABILITY") == 1
    refused = corral(server, "chat", given="/set n=2\n/set prompt_logprobs=1\n/bye\nnever read\n")
    assert refused.returncode == 0
    assert "one answer" in refused.stderr
    assert "prompt_logprobs" in refused.stderr
    assert refused.stdout == ""


def test_an_error_begins_on_a_line_of_its_own(server: FakeServer) -> None:
    server.set_faults("cut")
    try:
        done = subprocess.run(
            [*COMMAND, "complete", "a", "--url", server.url, "--max-tokens", "20"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
    finally:
        server.set_faults()
    assert re.search(r"^corral: ", done.stdout, re.MULTILINE), done.stdout


def test_words_of_other_tools_are_understood() -> None:
    for word, verb in (("serve", "corral up"), ("ls", "corral ps"), ("stop", "corral down"), ("help", "--help")):
        done = corral(None, word)
        assert done.returncode == 2
        assert verb in done.stderr


def test_every_parameter_is_in_the_help() -> None:
    for verb in ("complete", "chat"):
        done = corral(None, verb, "--help")
        words = " ".join(done.stdout.split())
        for name in (*PARAMETERS, *STRUCTURED, "param", "url", "key_file"):
            assert "--" + name.replace("_", "-") in words
        assert "[0 to 2]" in words


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["complete", "a", "--temperature", "3"], 2, "0 to 2"),
        (["complete", "a", "--top-p", "0"], 2, "above 0, to 1"),
        (["complete", "a", "--param", "nonsense"], 2, "NAME=VALUE"),
        (["complete", "a", "--param", "temperatur=1"], 2, "'temperature'"),
        (["complete", "a", "--regex", "a", "--choice", "b"], 2, "one of them"),
        (["complete", "a", "-f", "b"], 2, "one of them"),
        (["complete", "-f", "/nowhere"], 3, "there is no file"),
        (["complete", "a", "--json-schema", "@/nowhere"], 3, "there is no file"),
        (["complete", "a", "--model", "other"], 3, "fake"),
        (["complete", "word " * 9000], 2, "too long"),
        (["complete", "a", "--logprobs", "99"], 2, "99"),
        (["chat", "--min-p", "2"], 2, "0 to 1"),
        (["chat", "-n", "2"], 2, "corral complete -n"),
        (["chat", "--prompt-logprobs", "1"], 2, "corral complete --prompt-logprobs"),
        (["score", "-i", "/nowhere.jsonl", "-o", "x.jsonl"], 3, "there is no file"),
    ],
)
def test_refusals(
    server: FakeServer, arguments: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = corral(server, *arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "→" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_ready() -> None:
    for verb in (["complete", "a"], ["chat"], ["top"]):
        done = corral(None, *verb)
        assert done.returncode == 3
        assert "corral up" in done.stderr


def test_faults_end_with_a_remedy(server: FakeServer) -> None:
    for fault, code in (("cut", 9), ("error", 7), ("abort", 7), ("status:code=500", 7), ("reset", 9)):
        server.set_faults(fault)
        try:
            done = corral(server, "complete", "a", "--max-tokens", "20")
        finally:
            server.set_faults()
        assert done.returncode == code, fault
        assert "→" in done.stderr


def test_ctrl_c_ends_a_completion() -> None:
    with FakeServer(FakeOptions(pace=Pace(itl_s=0.2), answer_tokens=None)) as slow:
        process = subprocess.Popen(
            [*COMMAND, "complete", "a", "--url", slow.url, "--max-tokens", "500"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert told.strip() == "corral: interrupted"


def test_a_piped_chat(server: FakeServer, tmp_path: Path) -> None:
    saved = tmp_path / "talk one.json"
    given = f"hello\n/system be kind\n/retry\n/set temperature=0.5\n/set\n/save '{saved}'\n/quit\nnever read\n"
    done = corral(server, "chat", "--max-tokens", "6", given=given)
    assert done.returncode == 0
    assert "temperature=0.5" in done.stderr
    talk = json.loads(saved.read_text())
    assert [message["role"] for message in talk] == ["system", "user", "assistant"]
    again = corral(server, "chat", "--load", f"'{saved}'", "--max-tokens", "6", given="/system\nmore\n")
    assert "be kind" in again.stderr
    assert again.stdout.strip()


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            os.execve(sys.executable, [*COMMAND, *arguments], {**env, "TERM": "xterm-256color"})
        self.seen = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def until(self, text: str, limit_s: float = 120) -> str:
        """Read until some text shows up; what was read before it is forgotten."""
        end = time.monotonic() + limit_s
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} never came: {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += self._decode(os.read(self.fd, 65536))
                except OSError:
                    break
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, key: str, text: str) -> None:
        """Press a key until it shows its effect: readline misses one that comes before it listens."""
        for attempt in range(20):
            self.type(key)
            try:
                self.until(text, 2)
                return
            except AssertionError:
                if attempt == 19:
                    raise

    def end(self) -> int:
        _, status = until(lambda: ended if (ended := os.waitpid(self.pid, os.WNOHANG))[0] else None, "its end")
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_a_chat_in_a_terminal(tmp_path: Path) -> None:
    with FakeServer(FakeOptions(pace=Pace(itl_s=0.05), answer_tokens=None)) as slow:
        terminal = Terminal("chat", "--url", slow.url, "--max-tokens", "1000")
        terminal.until("› ")
        terminal.type("tell me\n")
        terminal.until("tell me")
        terminal.until(" ")  # words of the answer
        terminal.until(" ")
        terminal.type("\x03")  # Ctrl-C: only the answer stops
        terminal.until("(stopped)", 60)
        terminal.until("› ")
        terminal.press("\x03", "ends the conversation")  # at the prompt: a hint
        terminal.type("/set max_tokens=4\n")
        terminal.until("max_tokens=4")
        terminal.until("› ")
        terminal.type("and \\\n")
        terminal.until("… ")
        terminal.type("this 🎉\n")
        assert re.search(r"\(4 tokens, [\d,.]+ tok/s\)", terminal.until("token limit"))
        terminal.type(f"/save {tmp_path}/t.json\n")
        terminal.until("saved 4 messages")
        terminal.until("› ")
        terminal.type("\x04")
        assert terminal.end() == 0
        talk = json.loads((tmp_path / "t.json").read_text())
        assert talk[0]["content"] == "tell me"
        assert talk[1]["content"]
        assert talk[2]["content"] == "and \nthis 🎉"


@pytest.fixture
def offered(answering: Corral, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A chat without a server, which asks whether to start one."""
    for name, value in {**answering.env, "CORRAL_MODEL": str(answering.model)}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal("chat")
    terminal.until("Start one now, as `corral up` does? [y/N]: ")
    return terminal


def test_a_chat_without_a_server_offers_to_start_one(answering: Corral, offered: Terminal) -> None:
    offered.type("y\n")
    offered.until("is ready")
    offered.until("/help")
    offered.until("› ")
    offered.type("hello\n")
    offered.until("tokens")
    offered.until("› ")
    offered.type("\x04")
    assert offered.end() == 0
    (served,) = answering("ps", "--json").json()
    assert served["state"] == "ready"


def test_an_offer_may_be_declined_and_is_made_to_people_only(answering: Corral, offered: Terminal) -> None:
    offered.type("n\n")
    offered.until("Start one with `corral up`")
    assert offered.end() == 3
    piped = answering("chat")
    assert (piped.code, piped.out) == (3, "")
    assert "Start one with `corral up`" in piped.err


def test_the_heat_map_in_a_terminal(server: FakeServer) -> None:
    terminal = Terminal("complete", "San Francisco", "--url", server.url, "--logprobs", "1", "--max-tokens", "3")
    assert "\x1b[30;48;5;" in terminal.until("RANK")
    terminal.until("2  ")
    assert terminal.end() == 0


def test_top(server: FakeServer) -> None:
    done = corral(server, "top", "--once", "--interval", "0.2")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split()[:3] == ["NAME", "RUNNING", "WAITING"]
    document: list[dict[str, Any]] = json.loads(corral(server, "top", "--json", "--interval", "0.2").stdout)
    assert document[0]["reading"]["running"] == 0
    assert document[0]["load"]["generated_tokens_per_s"] == 0


@pytest.mark.parametrize("key", ["\x03", "q"])
def test_top_live_leaves_cleanly(server: FakeServer, key: str) -> None:
    terminal = Terminal("top", "--url", server.url, "--interval", "0.2")
    seen = "".join(f"{terminal.until('Ctrl-C')}Ctrl-C" for _ in range(2))
    terminal.type(key)
    seen += terminal.until("everything, up to its end")
    assert terminal.end() == 0
    left = left_on_screen(seen)
    assert [line.split()[0] for line in left] == ["NAME", server.url.removeprefix("http://")[:16], "Ctrl-C"]


def left_on_screen(seen: str) -> list[str]:
    """The lines that a terminal shows after all this: cursor up, clear line, carriage return and line feed."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", seen):
        if part == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            at -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[at] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[at] += part.replace("^C", "")
    return [line for line in lines if line.strip()]


def test_commands_of_a_talk(tmp_path: Path) -> None:
    talk = Conversation()
    assert talk.enter("  ").ask is False
    assert talk.enter("/retry").say == "there is no question to ask again"
    assert "/new" in talk.enter("/help").say
    assert "did you mean /save" in talk.enter("/sav x").say
    with pytest.raises(UsageError):
        talk.enter("/set temperature=5")
    with pytest.raises(UsageError):
        talk.enter("/save")
    with pytest.raises(DataError):
        talk.enter("/save /nowhere/at/all.json")
    (tmp_path / "bad.json").write_text("{}x")
    with pytest.raises(DataError):
        talk.enter(f"/load {tmp_path}/bad.json")
    talk.enter("hi")
    talk.answered("yes")
    talk.enter("again")
    talk.unanswered()
    assert [message["content"] for message in talk.messages] == ["hi", "yes"]
    talk.enter("/system be kind")
    talk.enter("/new")
    assert talk.to_send() == [{"role": "system", "content": "be kind"}]
    talk.enter("/system -")
    assert talk.to_send() == []
    assert all(callable(getattr(talk, "_" + name.split()[0][1:])) for name in COMMANDS)

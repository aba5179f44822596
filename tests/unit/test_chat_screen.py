"""What `corral chat` writes: wrapped Markdown, folded thoughts, calls of tools, pictures."""

from __future__ import annotations

import fcntl
import json
import random
import re
import struct
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.base.errors import DataError
from corral.base.files import write_atomic
from corral.base.processes import own_identity
from corral.base.record import dump_json
from corral.cli.chat import _speed
from corral.client.endpoint import Endpoint
from corral.client.images import PICTURE, check_image, read_image
from corral.client.reply import Reply, Timing, Usage
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle.deployments import Record
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.lab.report.markdown import MarkdownStream
from corral.lab.report.tables import display_width
from corral.plan.models.facts import facts_from_config
from tests.unit.test_use_cli import Terminal, corral

PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde\0\0\0\x0cIDATx\x9cc\xf8\xcf\xc0\0\0\3\1\1\0\xc9"
    b"\xfe\x92\xef\0\0\0\0IEND\xaeB`\x82"
)
TEXT = """# A title

Some **bold text**, *italic*, `code x`, snake_case_name, 2 * 3 = 6, *args without an end, ***both*** and _under_.
- an item that is long enough to be broken, with **bold `code` inside** of it
  1. one below it
> a quote that is long enough to be broken somewhere
---
```python
def f(x):
    return x ** 2  # a line of code that is longer than the terminal is wide
```
没有空格的文字也要在行末断开，不能超出终端的宽度，**强调**也一样。
a\\*b path\\to\\x `never ended"""


def rendered(pieces: list[str], columns: int = 40, **settings: Any) -> str:
    stream = MarkdownStream(lambda: columns, **settings)
    return "".join(map(stream.feed, pieces)) + stream.end()


def cut(text: str, seed: int) -> list[str]:
    pieces, chance = [], random.Random(seed)
    while text:
        size = chance.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_markdown_is_drawn() -> None:
    shown = rendered([TEXT])
    assert "\033[1;4mtitle\033[0m" in shown
    assert "\033[1mbold\033[0m \033[1mtext\033[0m," in shown
    assert "\033[3mitalic\033[0m" in shown
    assert "\033[36mcode\033[0m" in shown
    assert "• an item" in shown
    assert "\033[2m```python\033[0m\n\033[36mdef f(x):\033[0m\n" in shown
    assert "\033[1;36mcode\033[0m" in shown
    for literal in ("snake_case_name", "2 * 3 = 6", "*args", "a*b", "path\\to\\x", "`never"):
        assert literal in shown


def test_words_are_wrapped_and_code_is_not() -> None:
    plain = re.sub(r"\033\[[\d;]*m", "", rendered([TEXT]))
    code = "    return x ** 2  # a line of code that is longer than the terminal is wide"
    lines = plain.split("\n")
    assert code in lines
    assert all(display_width(line) <= 40 for line in lines if line != code)
    assert any(line.startswith("  ") and "of it" in line for line in lines)  # below its item
    assert len([line for line in lines if line.startswith("│ ")]) == 2


@pytest.mark.parametrize("seed", range(40))
def test_pieces_make_the_same_as_the_whole(seed: int) -> None:
    joined = [re.sub(r"\033\[0m\033\[36m", "", rendered(pieces)) for pieces in (cut(TEXT, seed), [TEXT])]
    assert joined[0] == joined[1]


def test_a_word_is_written_as_soon_as_the_next_begins() -> None:
    stream = MarkdownStream(lambda: 40)
    assert stream.feed("Hello") == ""
    assert stream.feed(" wor") == "Hello"
    assert stream.feed("ld ") == " world"
    assert stream.feed("**x") == ""
    assert stream.feed("**,") == ""
    assert stream.feed(" ") == " \033[1mx\033[0m,"


@pytest.mark.parametrize("settings", [{}, {"markup": False}, {"colour": False}])
def test_nothing_of_a_model_controls_the_terminal(settings: dict[str, Any]) -> None:
    evil = "a \x1b]0;title\x07b \x1b[2J\x1b[1A `\x1b[5m` **\x9b31m** \u202egnp \r\nnext\rline\x08\n```\n\x1b[H\n```\n"
    for seed in range(20):
        shown = rendered(cut(evil, seed), **settings)
        left = re.sub(r"\033\[(?:[1234]|36)(?:;(?:[1234]|36))*m|\033\[0m", "", shown)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", left)
        assert "\nnext" in shown


def test_without_colour_the_marks_stay() -> None:
    shown = rendered([TEXT], colour=False)
    assert "\033" not in shown
    assert "# A title" in shown
    assert "**bold text**" in shown


def test_a_hostile_answer_is_read_in_time() -> None:
    for text in ("*" * 3_000, "`" * 3_000, "- " * 3_000, "_a" * 3_000, "*a `" * 2_000, " " * 5_000):
        assert rendered(cut(text, 1)) is not None


# The verb


def wide(terminal: Terminal, columns: int) -> Terminal:
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return terminal


def test_thoughts_are_folded_and_markdown_is_drawn_in_a_terminal() -> None:
    answer = "xxxx yyy zzz **bold** and a line that is longer than the terminal, which is wrapped between words"
    with FakeServer(FakeOptions(answer=answer, thoughts=3, pace=Pace(itl_s=0.01))) as server:
        terminal = wide(Terminal("chat", "--url", server.url), 50)
        terminal.until("› ")
        terminal.type("tell me\n")
        seen = terminal.until("tok/s")
        terminal.until("› ")  # readline misses a key that comes before it listens
        terminal.type("\x04")
        assert terminal.end() == 0
    assert re.search(r"\(thought for [\d.]+ m?s, 3 tokens\)", seen)
    assert "xxxx" not in seen
    assert "\033[1mbold\033[0m" in seen
    text = re.sub(r"\033\[[\d;]*[mJ]", "", seen).replace("\r", "").partition("3 tokens)\n")[2]
    assert len(text.split("\n")) >= 3
    assert all(len(line) <= 50 for line in text.split("\n")[:-1])


@pytest.mark.parametrize(
    ("chunk_ms", "shown"),
    [
        ((500, 600, 800), "(12 tokens, 36.7 tok/s)"),
        ((500, 500, 500), "(12 tokens)"),  # one read of the network
        ((500, 500.04), "(12 tokens)"),
        ((), "(12 tokens)"),
    ],
)
def test_a_speed_is_shown_where_it_can_be_measured(chunk_ms: tuple[float, ...], shown: str) -> None:
    timing = Timing(0, 0, 0, 0, [round(ms * 1e6) for ms in chunk_ms])
    assert _speed(Reply([], Usage(completion_tokens=12), timing, "", "m", 200, b"")) == shown


def test_thoughts_are_shown_where_they_are_wanted() -> None:
    with FakeServer(FakeOptions(answer="xxxx yyy zzz end", thoughts=3)) as server:
        folded = corral(server, "chat", given="hello\n")
        shown = corral(server, "chat", "--thoughts", given="hello\n")
    assert folded.stdout == " end\n"
    assert shown.stdout == "xxxx yyy zzz\n\n end\n"


def test_calls_of_tools_are_shown_and_kept(tmp_path: Path) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    saved = tmp_path / "talk.json"
    with FakeServer(FakeOptions(tool_calls=(("add", '{"a": 2, "b": "x y"}'),))) as server:
        done = corral(server, "chat", "--param", f"tools={tools}", given=f"sum\n/save {saved}\n")
        again = corral(server, "chat", "--load", str(saved), given=f"more\n/save {saved}\n")
    assert done.stdout == '→ add({"a": 2, "b": "x y"})\n'
    call = json.loads(saved.read_text())[1]["tool_calls"][0]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": "x y"}'}
    assert (again.returncode, again.stderr.count("saved 4 messages")) == (0, 1)


def test_a_picture_goes_with_one_message(tmp_path: Path) -> None:
    picture, saved = tmp_path / "one.png", tmp_path / "talk.json"
    picture.write_bytes(PNG)
    with FakeServer() as server:
        lines = f"what is it?\nand now?\n/image '{picture}'\n/image {picture}\nthese?\n/save {saved}\n"
        done = corral(server, "chat", "--max-tokens", "4", "--image", str(picture), given=lines)
        assert (done.returncode, "2 pictures with the next message" in done.stderr) == (0, True)
        talk = json.loads(saved.read_text())
        again = corral(server, "chat", "--max-tokens", "4", "--load", str(saved), given="/retry\n")
        assert again.returncode == 0
        alone = corral(server, "chat", "--max-tokens", "4", given="what is it?\n")
    kinds = [[part["type"] for part in one["content"]] for one in talk if isinstance(one["content"], list)]
    assert kinds == [["image_url", "text"], ["image_url", "image_url", "text"]]
    assert talk[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert talk[2]["content"] == "and now?"
    assert done.stdout.splitlines()[0] != alone.stdout.splitlines()[0]  # the picture reached the server


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"no picture")
    with FakeServer() as server:
        refused = corral(server, "chat", "--image", str(path), given="")
        told = corral(server, "chat", given=f"/image {tmp_path}/nothing\n/image {tmp_path}\n")
    assert (refused.returncode, "is not a picture" in refused.stderr) == (10, True)
    assert "cannot be read: No such file" in told.stderr
    assert "is not a file" in told.stderr
    path.write_bytes(PNG)
    with path.open("r+b") as file:
        file.truncate(PICTURE.most_bytes + 1)
    for read in (read_image, check_image):
        with pytest.raises(DataError, match="at most 20 MiB"):
            read(path)
    with pytest.raises(DataError, match="is not a file"):
        read_image(Path("/dev/zero"))


def test_a_deployment_that_reads_only_text_refuses_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "one.png"
    picture.write_bytes(PNG)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
             "vocab_size": 100, "max_position_embeddings": 128}  # fmt: skip
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    plan = SimpleNamespace(model=facts_from_config(config, "m", "m", "folder"))
    monkeypatch.setattr("corral.deploy.lifecycle.deployments.plan_of", lambda _: plan)
    with FakeServer() as server:
        write_served(server.url)
        refused = corral(server, "chat", "--image", str(picture), given="")
        told = corral(server, "chat", "--max-tokens", "3", given=f"/image {picture}\nhello\n")
    assert (refused.returncode, "reads text only" in refused.stderr) == (2, True)
    assert "reads text only" in told.stderr
    assert told.stdout.strip()


def write_served(url: str) -> None:
    """A deployment of this home that answers there."""
    folder = DeploymentFolder.of("served")
    folder.create()
    write_atomic(folder.record, dump_json(Record("served", "id", "fake", "fake", "local", 0.0, own_identity())))
    write_atomic(folder.endpoint, dump_json(Endpoint(f"{url}/v1", "fake", None)))


@pytest.mark.parametrize(
    ("architecture", "more", "only_text"),
    [
        ("LlamaForCausalLM", {}, True),
        ("LlavaForConditionalGeneration", {"vision_config": {"hidden_size": 8, "num_hidden_layers": 1,
         "intermediate_size": 8, "num_attention_heads": 1, "patch_size": 2, "image_size": 4}}, False),
        ("MysteryForConditionalGeneration", {}, False),
    ],
)  # fmt: skip
def test_what_certainly_reads_no_pictures(architecture: str, more: dict[str, Any], only_text: bool) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
             "vocab_size": 100, "max_position_embeddings": 128}  # fmt: skip
    config = {"model_type": "llama", "architectures": [architecture], **sizes, **more}
    assert facts_from_config(config, "m", "m", "folder").only_text is only_text

"""A gated model at a terminal and without one: where a token comes from, who is asked, and where it is kept."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from corral.base.errors import DataError, UsageError
from corral.plan.models.hub import checked_token, keep_token, token_origin
from tests.fake_hub import FakeHub
from tests.unit.conftest import Corral

GOOD = "tok-en-that-is-good"
# getpass asks the terminal that the process belongs to, not its standard input
OWN_TERMINAL = (
    "import fcntl, os, sys, termios as t; fcntl.ioctl(0, t.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def at_a_terminal(corral: Corral, typed: str, *arguments: str, **options: str) -> tuple[int, str]:
    """How `corral` ended with a terminal of its own, and all that it showed; `typed` answers its question."""
    terminal, inside = pty.openpty()
    command = [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "corral", *arguments]
    running = subprocess.Popen(
        command, env={**corral.env, **options}, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    shown, asked = b"", False
    while select.select([terminal], [], [], 60)[0]:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # the other end was closed
            break
        shown += more
        if not asked and b"Token (" in shown:
            asked = True
            os.write(terminal, typed.encode())
    os.close(terminal)
    return running.wait(120), " ".join(shown.decode().split())  # lines break at the terminal's width


@pytest.fixture
def kept(clean_home: Path) -> Path:
    return clean_home / ".cache" / "huggingface" / "token"


def settings(hub: FakeHub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def test_a_terminal_is_asked_and_the_token_kept(corral: Corral, tiny_model: Path, kept: Path) -> None:
    with FakeHub({"lab/gated": tiny_model}, gated={"lab/gated"}) as hub:
        code, shown = at_a_terminal(corral, f" {GOOD}\n", "pull", "lab/gated", **settings(hub))
        assert code == 0, shown
        assert "https://huggingface.co/lab/gated" in shown
        assert "https://huggingface.co/settings/tokens" in shown
        assert GOOD not in shown
        assert kept.read_text() == GOOD
        assert kept.stat().st_mode & 0o777 == 0o600
        again = corral("pull", "lab/gated", **settings(hub))  # nobody is asked any more
        assert again.code == 0, again.err
    for path in (corral.home / "corral").rglob("*"):
        if path.is_file():
            assert GOOD not in path.read_text(errors="replace")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("tok-en-of-somebody-else\n", "the token (as typed) may not read it"),
        ("revoked\n", "the hub rejected the token (as typed)"),
        ("\n", "no token was given"),
        ("\x04", "no token was given"),
        ("two words\n", "not a token of the hub"),
    ],
)
def test_a_token_that_does_not_work_is_not_kept(
    corral: Corral, tiny_model: Path, kept: Path, typed: str, words: str
) -> None:
    with FakeHub({"lab/gated": tiny_model}, gated={"lab/gated"}) as hub:
        code, shown = at_a_terminal(corral, typed, "pull", "lab/gated", **settings(hub))
    assert code in (2, 6)
    assert words in shown
    assert "somebody-else" not in shown
    assert not kept.exists()


def test_without_a_terminal_it_is_refused_with_a_remedy(corral: Corral, tiny_model: Path, kept: Path) -> None:
    with FakeHub({"lab/gated": tiny_model}, gated={"lab/gated"}) as hub:
        for verb in ("pull", "up"):
            done = corral(verb, "lab/gated", **settings(hub))
            assert done.code == 6
            assert "lab/gated is gated, and there is no token." in done.err
            assert "`corral pull lab/gated` at a terminal" in done.err
            assert "HF_TOKEN" in done.err
    assert not kept.exists()


@pytest.mark.parametrize("verb", ["pull", "up"])
def test_a_token_that_is_there_and_refused_is_named_by_its_place(
    corral: Corral, tiny_model: Path, kept: Path, verb: str
) -> None:
    """Nobody is asked: a new one would not be used before the variable, nor replace what somebody keeps."""
    with FakeHub({"lab/gated": tiny_model}, gated={"lab/gated"}) as hub:
        code, shown = at_a_terminal(corral, f"{GOOD}\n", verb, "lab/gated", **settings(hub), HF_TOKEN="bad")
        assert (code, "the token (HF_TOKEN) may not read it" in shown) == (6, True), shown
        kept.parent.mkdir(parents=True)
        kept.write_text("bad")
        code, shown = at_a_terminal(corral, f"{GOOD}\n", verb, "lab/gated", **settings(hub))
        assert (code, f"the token ({kept})" in shown) == (6, True), shown
        done = corral("pull", "lab/gated", **settings(hub), HF_TOKEN="revoked")
        assert (done.code, "rejected the token (HF_TOKEN)" in done.err) == (6, True), done.err
    assert kept.read_text() == "bad"


def test_where_a_token_cannot_be_kept(clean_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (clean_home / "file").write_text("")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(clean_home / "file" / "token"))
    with pytest.raises(DataError, match=r"cannot be kept in .*/file/token"):
        keep_token(GOOD)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(clean_home / "token"))
    assert token_origin() == ""
    assert keep_token(GOOD) == clean_home / "token"
    assert token_origin() == str(clean_home / "token")
    monkeypatch.setenv("HF_TOKEN", "other")
    assert token_origin() == "HF_TOKEN"


@pytest.mark.parametrize("text", ["", "  \n", "a b", "tök", "a\x00b", "x" * 1001])
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        checked_token(text)
    assert text.strip() == "" or text not in str(refused.value)

"""A conversation with a model: its messages, and the slash commands of `corral chat`. The terminal is elsewhere."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import DataError, UsageError
from corral.base.files import read_text, write_atomic
from corral.base.record import nearest
from corral.base.wording import counted
from corral.client.images import image_part, read_image
from corral.client.reply import ToolCall
from corral.client.sampling import PARAMETERS, STRUCTURED, parse_assignments, request_fields

COMMANDS: dict[str, str] = {
    "/help": "this list",
    "/system TEXT": "set the system message; alone: show it; `-`: remove it",
    "/image FILE": "add a picture to the next message; alone: drop those added",
    "/retry": "ask the last question again",
    "/new": "forget the messages; keep system message and settings",
    "/set NAME=VALUE": "change a sampling parameter; alone: show all",
    "/save FILE": "write the conversation as JSON, in OpenAI's form",
    "/load FILE": "continue a saved conversation",
    "/quit": "leave (so do /exit, /bye and Ctrl-D)",
}


@dataclass(frozen=True)
class Turn:
    """The effect of a line: a request to the model, a text to show, or the end."""

    ask: bool = False
    say: str = ""
    end: bool = False


@dataclass
class Conversation:
    """Messages and sampling parameters."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)  # URLs, for the next message
    only_text: Callable[[], bool] = lambda: False  # whether the model certainly takes no pictures

    def to_send(self) -> list[dict[str, Any]]:
        """The messages as the server gets them."""
        head: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages]

    def enter(self, line: str) -> Turn:
        """Handle one line of the user: a command or a message."""
        text = line.strip()
        if not text:
            return Turn()
        if not text.startswith("/"):
            parts = [*map(image_part, self.images), {"type": "text", "text": text}]
            self.messages.append({"role": "user", "content": parts if self.images else text})
            self.images = []
            return Turn(ask=True)
        command, _, rest = text.partition(" ")
        command = "/quit" if command in ("/exit", "/bye") else command
        known = [name.split()[0] for name in COMMANDS]
        if command not in known:
            guess = nearest(command, known, 1)
            return Turn(
                say=f"there is no {command}; " + (f"did you mean {guess[0]}?" if guess else "/help lists all")
            )
        turn: Turn = getattr(self, f"_{command[1:]}")(rest.strip())
        return turn

    def add_image(self, path: Path) -> None:
        """Add a picture to the next message."""
        if self.only_text():
            raise UsageError(
                "this model reads text only, no pictures.",
                "Start one that does: `corral models --search vl` lists some.",
            )
        self.images.append(read_image(path))

    def answered(self, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Add the model's answer, complete or not; calls whose arguments are no JSON object cannot be sent again."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if whole := [_call(call) for call in calls if _is_object(call.arguments)]:
            message["tool_calls"] = whole
        self.messages.append(message)

    def unanswered(self) -> None:
        """Remove a message that got no answer, so that it is not sent with the next one."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def _help(self, _: str) -> Turn:
        width = max(map(len, COMMANDS))
        return Turn(say="\n".join(f"{name:<{width}}  {text}" for name, text in COMMANDS.items()))

    def _system(self, text: str) -> Turn:
        if not text:
            return Turn(say=self.system or "(no system message)")
        self.system = None if text == "-" else text
        return Turn(say="system message removed" if text == "-" else "system message set")

    def _retry(self, _: str) -> Turn:
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return Turn(ask=True) if self.messages else Turn(say="there is no question to ask again")

    def _image(self, text: str) -> Turn:
        if not text:
            dropped, self.images = len(self.images), []
            return Turn(say=f"dropped {counted(dropped, 'picture')}")
        self.add_image(_path(text, "/image"))
        return Turn(say=f"{counted(len(self.images), 'picture')} with the next message")

    def _new(self, _: str) -> Turn:
        self.messages.clear()
        return Turn(say="a new conversation")

    def _set(self, text: str) -> Turn:
        if text:
            changed = {**self.sampling, **_parse_setting(text, self.sampling.get("extra") or {})}
            check_chat(changed)
            self.sampling = {key: setting for key, setting in changed.items() if setting is not None}
        settings = {**self.sampling, **(self.sampling.get("extra") or {})}
        settings.pop("extra", None)
        shown = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())
        return Turn(say=shown or "(the server's defaults)")

    def _save(self, text: str) -> Turn:
        path = _path(text, "/save")
        try:
            write_atomic(path, json.dumps(self.to_send(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}.", "Choose another file.") from None
        return Turn(say=f"saved {counted(len(self.messages), 'message')} to {path}")

    def _load(self, text: str) -> Turn:
        path = _path(text, "/load")
        try:
            saved = json.loads(read_text(path))
            messages = [_message(item) for item in saved]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(f"{path} holds no conversation.", "It must be a JSON list of messages.") from None
        first = messages[0] if messages else {"role": ""}
        self.system = first["content"] if first["role"] == "system" and isinstance(first["content"], str) else None
        self.messages = messages[1:] if self.system is not None else messages
        return Turn(say=f"loaded {counted(len(self.messages), 'message')}")

    def _quit(self, _: str) -> Turn:
        return Turn(end=True)


def _message(item: Any) -> dict[str, Any]:
    """One message of a saved conversation."""
    role, content = item["role"], item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list | None):
        raise TypeError
    return {"role": role, "content": content, **{k: item[k] for k in ("tool_calls", "tool_call_id") if k in item}}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _parse_setting(text: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """One setting, checked like `--param`: unknown names are passed on, misspelt ones refused."""
    setting = parse_assignments([text])
    return setting if setting.keys() <= PARAMETERS.keys() | STRUCTURED.keys() else {"extra": {**extra, **setting}}


def check_chat(sampling: Mapping[str, Any]) -> None:
    """Refuse parameters that a conversation in a terminal cannot use."""
    if (sampling.get("n") or 1) > 1:
        raise UsageError(
            f"n={sampling['n']}: a chat shows one answer to each message.", "`corral complete -n N` shows several."
        )
    if sampling.get("prompt_logprobs") is not None:
        raise UsageError(
            "prompt_logprobs is for single prompts, not for a chat.", "Use `corral complete --prompt-logprobs N`."
        )
    request_fields(dict(sampling), chat=True)


def _path(text: str, command: str) -> Path:
    try:
        names = shlex.split(text)
    except ValueError:
        names = [text]
    if len(names) != 1:
        raise UsageError(f"{command} needs one file name.", f"For example {command} talk.json.")
    return Path(names[0]).expanduser()

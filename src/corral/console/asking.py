"""What the Playground asks: a prompt and its settings from the page, the request made of them, and the same as text.

The request is made where `corral.LLM` makes its own, so that ranges are checked alike; curl and Python say exactly
what the page sends. Keys are in neither: the shell gets them from `corral env`, Python from the deployment.
"""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.base.errors import UsageError
from corral.client.sampling import PARAMETERS, STRUCTURED
from corral.use.llm.llm import Prompt, is_chat, request_for

MOST_ALTERNATIVES = 20  # what vLLM gives unless it was started with more
_PAGES_OWN = ("logprobs", "prompt_logprobs")  # the page asks for them by its own switch
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # tokens by id: their bytes are asked apart


@dataclass(frozen=True)
class PlayRequest:
    """One question; `server` is a deployment or a fleet, or empty for the address of the environment."""

    server: str
    prompt: Prompt
    sampling: dict[str, Any] = field(default_factory=dict)
    alternatives: int | None = 5  # to each token; None: no probabilities at all
    model: str | None = None  # where a server has several


def parameter_table() -> list[dict[str, Any]]:
    """Every parameter that can be set, for a form."""
    rows = [
        {"name": one.name, "kind": one.kind, "help": one.help, "low": one.low, "high": one.high,
         "range": one.range_text, "structured": False}
        for one in PARAMETERS.values() if one.name not in _PAGES_OWN
    ]  # fmt: skip
    forms = {"json_schema": "json", "choice": "texts"}
    rows += [
        {"name": name, "kind": forms.get(name, "text"), "help": help, "low": None, "high": None, "range": "",
         "structured": True}
        for name, (_, help) in STRUCTURED.items()
    ]  # fmt: skip
    return rows


def read_play(body: Mapping[str, Any]) -> PlayRequest:
    """A question as the page sends it, checked."""
    server, model, sampling = body.get("server", ""), body.get("model"), body.get("sampling", {})
    alternatives, prompt = body.get("alternatives"), body.get("prompt")
    if not isinstance(server, str) or not (model is None or isinstance(model, str)) or not isinstance(sampling, dict):
        raise UsageError("the question is not as the page asks it.", "Load the page again.")
    if alternatives is not None and (not isinstance(alternatives, int) or not 0 <= alternatives <= MOST_ALTERNATIVES):
        raise UsageError(f"alternatives cannot be {alternatives!r}.", f"Give 0 to {MOST_ALTERNATIVES}, or none.")
    if not prompt or not isinstance(prompt, str | list):
        raise UsageError("there is nothing to ask.", "Write a prompt.")
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        prompt = [_message(one) for one in prompt]
    kept = {name: value for name, value in sampling.items() if name not in _PAGES_OWN and value is not None}
    return PlayRequest(server, prompt, kept, alternatives, model or None)


def _message(given: Any) -> dict[str, str]:
    role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError("a message has no role or no text.", "Each needs both.")
    return {"role": role, "content": content}


def stream_request(asked: PlayRequest) -> tuple[str, dict[str, Any]]:
    """The path and the body of a streamed answer."""
    path, body = request_for(asked.prompt, {**asked.sampling, "logprobs": asked.alternatives})
    extra = _IDS if asked.alternatives is not None else {}
    return path, {**body, "stream": True, "stream_options": {"include_usage": True}, **extra}


def prompt_request(asked: PlayRequest) -> tuple[str, dict[str, Any]]:
    """The path and the body that give the probabilities of the prompt's own tokens; the answer is one token."""
    path, body = request_for(asked.prompt, {"prompt_logprobs": asked.alternatives or 0, "max_tokens": 1})
    return path, {**body, **_IDS}


def as_curl(asked: PlayRequest, model: str) -> str:
    """The request for a shell."""
    path, body = stream_request(asked)
    begin = f'eval "$(corral env {shlex.quote(asked.server)})"\n' if asked.server else ""
    sent = json.dumps({"model": model, **body}, ensure_ascii=False, indent=2)
    return (
        f'{begin}curl -sSN "$OPENAI_BASE_URL{path.removeprefix("/v1")}" \\\n'
        '  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(sent)}\n"
    )


def as_python(asked: PlayRequest) -> str:
    """The same with Corral's own client."""
    settings = {**asked.sampling, **({} if asked.alternatives is None else {"logprobs": asked.alternatives})}
    known = {name: value for name, value in settings.items() if name in PARAMETERS or name in STRUCTURED}
    more = settings.get("extra")
    lines = [
        f"    {name}={_literal(value)}," for name, value in {**known, **({"extra": more} if more else {})}.items()
    ]
    name = "messages" if is_chat(asked.prompt) else "prompt"
    where = [_literal(asked.server)] if asked.server else []
    where += [f"model={_literal(asked.model)}"] if asked.model else []
    call = f"llm.stream({name})" if not lines else "\n".join(["llm.stream(", f"    {name},", *lines, ")"])
    return (
        f"import corral\n\n{name} = {_literal(asked.prompt)}\n"
        f"with corral.connect({', '.join(where)}) as llm:\n"
        + _indented(f'for piece in {call}:\n    print(piece.text, end="", flush=True)\n')
    )


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _literal(value: Any) -> str:
    return pprint.pformat(value, width=90, sort_dicts=False)

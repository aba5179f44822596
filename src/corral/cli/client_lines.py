"""What other people's clients need to use an endpoint: variables and the command to type, one row for each client.

Values come from the deployment: address, served name, tokenizer and the file of its key. A key stands in variables
only, which `eval` sets; the command lines have none.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from corral.base.errors import UsageError
from corral.base.record import nearest


@dataclass(frozen=True)
class EndpointFacts:
    """An endpoint as clients need it."""

    root: str  # without /v1
    model: str
    key_file: str | None
    tokenizer: str  # a folder on this machine or a repository; empty where neither is known

    def values(self) -> dict[str, str]:
        tokenizer = self.tokenizer or "TOKENIZER"
        host = self.root.partition("://")[2]
        places = {"root": self.root, "url": f"{self.root}/v1", "host": host}
        return {**places, "model": self.model, "tokenizer": tokenizer, "key_file": self.key_file or ""}


@dataclass(frozen=True)
class ClientRow:
    """One client: its variables, and what to type then; `{key}` is the key, in variables only."""

    variables: Mapping[str, str]
    typed: str = ""


_OPENAI = {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"}
_SCRAPED = """scrape_configs:
- job_name: corral
  authorization:
    credentials_file: {key_file}
  static_configs:
  - targets: ['{host}']"""
CLIENTS: dict[str, ClientRow] = {
    "aider": ClientRow({"OPENAI_API_BASE": "{url}", "OPENAI_API_KEY": "{key}"}, "aider --model openai/{model}"),
    "anthropic": ClientRow({"ANTHROPIC_BASE_URL": "{root}", "ANTHROPIC_API_KEY": "{key}"}),
    "guidellm": ClientRow(
        {"GUIDELLM__OPENAI__API_KEY": "{key}"},
        "guidellm benchmark --target {root} --model {model} --processor {tokenizer}"
        " --rate-type sweep --max-seconds 60 --data prompt_tokens=256,output_tokens=128",
    ),
    "inspect": ClientRow(
        {"CORRAL_BASE_URL": "{url}", "CORRAL_API_KEY": "{key}"}, "inspect eval TASK --model openai-api/corral/{model}"
    ),
    "langchain": ClientRow(_OPENAI),
    "litellm": ClientRow(
        {"OPENAI_API_BASE": "{url}", "OPENAI_API_KEY": "{key}"}, "litellm --model openai/{model} --port 4000"
    ),
    "lm-eval": ClientRow(
        {"OPENAI_API_KEY": "{key}"},
        "lm_eval --model local-completions --tasks TASK --model_args"
        " model={model},base_url={url}/completions,tokenizer={tokenizer},tokenized_requests=True,num_concurrent=16",
    ),
    "openai": ClientRow(_OPENAI),
    "prometheus": ClientRow({}, _SCRAPED),
    "vllm-bench": ClientRow(
        {"OPENAI_API_KEY": "{key}"},
        "vllm bench serve --backend openai --base-url {root} --model {model} --tokenizer {tokenizer}"
        " --dataset-name random --num-prompts 200",
    ),
}


def client_called(name: str) -> ClientRow:
    """The row of a client."""
    if name not in CLIENTS:
        guess = nearest(name, list(CLIENTS), 1)
        hint = f"Did you mean {guess[0]!r}? " if guess else ""
        raise UsageError(
            f"{name!r} is not a client that Corral knows.",
            f"{hint}Known: {', '.join(CLIENTS)}; most others read the variables of `corral env`.",
        )
    return CLIENTS[name]


def variables_for(row: ClientRow, facts: EndpointFacts, key: str) -> dict[str, str]:
    """Names and values, the key among them."""
    values = {**facts.values(), "key": key or "none"}
    return {name: text.format(**values) for name, text in row.variables.items()}


def typed_line(row: ClientRow, facts: EndpointFacts) -> str:
    """What to type then; empty where the variables are all that the client needs."""
    is_shell = row.typed is not _SCRAPED
    values = facts.values()
    return row.typed.format(**{name: shlex.quote(text) if is_shell else text for name, text in values.items()})

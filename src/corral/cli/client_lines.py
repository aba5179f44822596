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
    """One client: its variables, what to type then, and the file that it reads; `{key}` is in variables only."""

    variables: Mapping[str, str]
    typed: str = ""
    file: str = ""


_OPENAI = {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}"}
_SCRAPED = """# prometheus.yml
scrape_configs:
- job_name: corral
  authorization:
    credentials_file: {key_file}
  static_configs:
  - targets: ['{host}']"""
_PERF = """# aiperf.yaml
benchmark:
  model: {model}
  tokenizer:
    name: {tokenizer}
  endpoint:
    url: {root}
    api_key: ${{OPENAI_API_KEY}}
    streaming: true
  dataset:
    type: synthetic
    prompts: {{isl: 256, osl: 128}}
  profiling:
    type: concurrency
    concurrency: 16
    requests: 200"""
_LLM = """# extra-openai-models.yaml, beside what `llm logs path` prints
- model_id: {model}
  model_name: {model}
  api_base: {url}
  api_key_name: corral
  supports_schema: true
  supports_tools: true"""
CLIENTS: dict[str, ClientRow] = {
    "aider": ClientRow({"OPENAI_API_BASE": "{url}", "OPENAI_API_KEY": "{key}"}, "aider --model openai/{model}"),
    "aiperf": ClientRow({"OPENAI_API_KEY": "{key}"}, "aiperf profile --config aiperf.yaml", _PERF),
    "anthropic": ClientRow({"ANTHROPIC_BASE_URL": "{root}", "ANTHROPIC_API_KEY": "{key}"}),
    "guidellm": ClientRow(
        {"GUIDELLM__SPEC__BACKEND__API_KEY": "{key}"},
        "guidellm run --backend kind=openai_http,target={root},model={model}"
        " --tokenizer kind=hf_auto,model={tokenizer} --profile kind=sweep --constraint kind=max_duration,seconds=60"
        " --data kind=synthetic_text,prompt_tokens=256,output_tokens=128",
    ),
    "inspect": ClientRow(
        {"CORRAL_BASE_URL": "{url}", "CORRAL_API_KEY": "{key}"}, "inspect eval TASK --model openai-api/corral/{model}"
    ),
    "langchain": ClientRow(_OPENAI),
    "litellm": ClientRow(
        {"OPENAI_API_BASE": "{url}", "OPENAI_API_KEY": "{key}", "LITELLM_MASTER_KEY": "{key}"},
        "litellm --model openai/{model} --port 4000",
    ),
    "llama-index": ClientRow(_OPENAI),
    "llm": ClientRow({"OPENAI_API_KEY": "{key}"}, "llm -m {model} QUESTION", _LLM),
    "lm-eval": ClientRow(
        {"OPENAI_API_KEY": "{key}"},
        "lm_eval --model local-completions --tasks TASK --model_args"
        " model={model},base_url={url}/completions,tokenizer={tokenizer},tokenized_requests=True,num_concurrent=16",
    ),
    "openai": ClientRow(_OPENAI),
    "prometheus": ClientRow({}, file=_SCRAPED),
    "vllm-bench": ClientRow(
        {"OPENAI_API_KEY": "{key}"},
        "vllm bench serve --backend openai --base-url {root} --model {model} --tokenizer {tokenizer}"
        " --dataset-name random --num-prompts 200",
    ),
    "vllm-router": ClientRow({}, "vllm-router --worker-urls {root} --port 30000"),
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
    """What to type then; empty where the variables or a file are all that the client needs."""
    return row.typed.format(**{name: shlex.quote(text) for name, text in facts.values().items()})


def file_text(row: ClientRow, facts: EndpointFacts) -> str:
    """What the client's file says; its name is in the first line."""
    return row.file.format(**facts.values())

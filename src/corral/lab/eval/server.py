"""What is evaluated: model, revision, engine, number format, plan, tokenizer; asked of the server once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.base.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from corral.base.record import to_json
from corral.client.client import Client
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint, ModelServer
from corral.client.errors import error_from_status
from corral.deploy.lifecycle.deployments import plan_of
from corral.lab.bench.fingerprint import Fingerprint, find_folder, read_fingerprint
from corral.plan.contract import Plan

_FORMATS = ("--dtype", "--quantization", "--kv-cache-dtype")


@dataclass(frozen=True)
class EvaluatedModel:
    """A served model, as far as its answers depend on it."""

    model: str
    engine: str  # vLLM 0.32.0
    revision: str  # the commit, or a digest of config and weights' sizes; empty where the files are not here
    number_format: str
    context: int
    tokens: dict[str, str]  # bos_token, eos_token, …
    chat_template: str
    fingerprint: Fingerprint
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for answers to be kept in one folder."""
        return {name: getattr(self, name) for name in ("model", "engine", "revision", "number_format")}


def read_model(endpoint: Endpoint) -> EvaluatedModel:
    """Ask a server what it is."""
    return run_loop(_read(endpoint))


async def _read(endpoint: Endpoint) -> EvaluatedModel:
    async with Client(endpoint, connect_s=10) as client:
        folder = find_folder(client)
        plan = plan_of(folder) if folder else None
        fingerprint = await read_fingerprint(client, folder, plan)
        page = await client.page("/tokenize", {"model": endpoint.model, "prompt": "a"}, timeout_s=60)
        if page.status == 404:
            raise UsageError(
                f"{endpoint.root} has no /tokenize, so it gives no log-likelihoods of prompts either.",
                "corral eval needs vLLM. For other servers: lm-eval's own chat models (docs/eval.md).",
            )
        if page.status != 200:
            raise error_from_status(page.status, page.body, None, endpoint.root)
        context = int(page.json()["max_model_len"])
        page = await client.page("/tokenizer_info", timeout_s=60)
        info = page.json() if page.status == 200 else {}
    return EvaluatedModel(
        endpoint.model,
        fingerprint.server.get("engine", ""),
        _revision(fingerprint.server.get("model_root", "")),
        number_format(plan, fingerprint),
        context,
        {name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _token(info, name))},
        str(info.get("chat_template") or ""),
        fingerprint,
        _settings(plan) if plan else {},
    )


def _token(info: dict[str, Any], name: str) -> str:
    value = info.get(name)
    return str(value.get("content", "") if isinstance(value, dict) else value or "")


def number_format(plan: Plan | None, fingerprint: Fingerprint) -> str:
    """The formats of weights, KV cache and computing; where there is no plan, what the engine's flags say."""
    if plan is not None:
        found = plan.precision
        how = f" ({found.method or found.how})" if found.method or found.how != "native" else ""
        computed = f", computed in {found.compute}" if found.compute else ""
        return f"weights {found.weights}{how}, KV cache {found.kv}{computed}"
    told = [flag for flag in fingerprint.flags if flag.replace("=", " ").split()[0] in _FORMATS]
    kv = fingerprint.cache.get("cache_dtype", "")
    return " ".join(told) or (f"KV cache {kv}" if kv else "")


def _settings(plan: Plan) -> dict[str, Any]:
    body = to_json(plan)
    return {name: body[name] for name in ("checkpoint", "precision", "parallel", "max_model_len", "settings")}


def _revision(root: str) -> str:
    """The commit in a path of the hub's cache; else a digest of the config and of the weights' names and sizes."""
    if found := re.search(r"/snapshots/([0-9a-f]{40})\b", root):
        return found[1]
    folder = Path(root)
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
            with path.open("rb") as file:  # the head of a safetensors file names every tensor with its place
                digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 20))
    except OSError:
        return ""
    return f"sha256:{digest.hexdigest()[:16]}"


class EvaluatedServers:
    """The servers of an evaluation, found when something must be asked; their model is that of earlier answers."""

    def __init__(self, find: Callable[[], Sequence[ModelServer]], known: EvaluatedModel | None, folder: Path) -> None:
        self._find, self._known, self._folder = find, known, folder
        self._found: Sequence[ModelServer] | None = None

    @property
    def model(self) -> EvaluatedModel:
        if self._known is None:
            self.find()
        assert self._known is not None
        return self._known

    def find(self) -> Sequence[ModelServer]:
        """The servers, at least one of which answers."""
        if self._found is None:
            found = self._find()
            endpoints = [endpoint for server in found if (endpoint := server.find())]
            if not endpoints:
                absence = found[0].absence()
                raise absence.ending or ConflictError(f"{absence.text}.", absence.remedy)
            for now in map(read_model, endpoints):
                self._check(now)
            self._found = found
        return self._found

    def check_those_that_answer(self) -> None:
        """Refuse another model also where nothing must be asked; a server that is away is none."""
        try:
            endpoints = [endpoint for server in self._find() if (endpoint := server.find())]
            answering = [read_model(endpoint) for endpoint in endpoints]
        except (UnreachableError, NotFoundError, OSError):
            return
        for now in answering:
            self._check(now)

    def _check(self, now: EvaluatedModel) -> None:
        before = self._known = self._known or now
        changed = [f"{k}: {v!r}, now {now.identity[k]!r}" for k, v in before.identity.items() if now.identity[k] != v]
        if changed:
            raise ConflictError(
                f"the answers in {self._folder} are of another model: {'; '.join(changed)}.",
                "Give another folder (-o), or start over in this one: --force.",
            )

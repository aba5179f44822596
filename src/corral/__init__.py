"""Corral: puts open models to work on whatever you have.

    import corral
    with corral.up("smollm2") as llm:
        print(llm.complete("San Francisco is a", max_tokens=7, temperature=0).text)

Everything here is imported on first use, so that `corral --help` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.endpoint import Endpoint
    from corral.errors import CorralError
    from corral.likelihood import Score, ScoreOptions
    from corral.llm import LLM, AsyncLLM
    from corral.reply import Piece, Reply, Token
    from corral.request_errors import RequestError
    from corral.score import Scores
    from corral.session import connect, up
    from corral.token_view import TokenView

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CorralError",
    "Endpoint",
    "Piece",
    "Reply",
    "RequestError",
    "Score",
    "ScoreOptions",
    "Scores",
    "Token",
    "TokenView",
    "__version__",
    "connect",
    "up",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "llm",
    "CorralError": "errors",
    "Endpoint": "endpoint",
    "Piece": "reply",
    "Reply": "reply",
    "RequestError": "request_errors",
    "Score": "likelihood",
    "ScoreOptions": "likelihood",
    "Scores": "score",
    "Token": "reply",
    "TokenView": "token_view",
    "connect": "session",
    "up": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'corral' has no attribute {name!r}")
    return getattr(importlib.import_module(f"corral.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

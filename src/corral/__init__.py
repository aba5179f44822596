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
    from corral.base.errors import CorralError
    from corral.client.endpoint import Endpoint
    from corral.client.errors import RequestError
    from corral.client.reply import Piece, Reply, Token
    from corral.deploy.profile.planning import plan
    from corral.plan.contract import Plan
    from corral.use.batch.batch import batch
    from corral.use.llm.llm import LLM, AsyncLLM
    from corral.use.llm.session import connect, up
    from corral.use.llm.token_view import TokenView
    from corral.use.score.likelihood import Score, ScoreOptions
    from corral.use.score.score import Scores

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CorralError",
    "Endpoint",
    "Piece",
    "Plan",
    "Reply",
    "RequestError",
    "Score",
    "ScoreOptions",
    "Scores",
    "Token",
    "TokenView",
    "__version__",
    "batch",
    "connect",
    "plan",
    "up",
]

_HOMES = {
    "LLM": "use.llm.llm",
    "AsyncLLM": "use.llm.llm",
    "CorralError": "base.errors",
    "Endpoint": "client.endpoint",
    "Piece": "client.reply",
    "Plan": "plan.contract",
    "Reply": "client.reply",
    "RequestError": "client.errors",
    "Score": "use.score.likelihood",
    "ScoreOptions": "use.score.likelihood",
    "Scores": "use.score.score",
    "Token": "client.reply",
    "TokenView": "use.llm.token_view",
    "batch": "use.batch.batch",
    "connect": "use.llm.session",
    "plan": "deploy.profile.planning",
    "up": "use.llm.session",
}


def __getattr__(name: str) -> Any:
    """A public name; `plan` is a package of this one, too, and calls this when it is called itself."""
    if name not in _HOMES:
        raise AttributeError(f"module 'corral' has no attribute {name!r}")
    return getattr(importlib.import_module(f"corral.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""How the ranks of one replica find each other: ranks -> vLLM arguments and environment.

`single` is one node; vLLM's own multi-node mode and Ray join this table with the targets that have several nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.errors import UsageError

__all__ = ["LINKS", "LinkedRank", "link_ranks"]


@dataclass(frozen=True)
class LinkedRank:
    """What the link adds to one rank's command."""

    rank: int
    node: str
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    serves: bool = True  # whether this rank answers HTTP


def _single(nodes: Sequence[str]) -> tuple[LinkedRank, ...]:
    if len(nodes) != 1:
        raise UsageError(f"the link 'single' joins one node, not {len(nodes)}.", "Use another link.")
    return (LinkedRank(0, nodes[0]),)


LINKS: dict[str, Callable[[Sequence[str]], tuple[LinkedRank, ...]]] = {"single": _single}


def link_ranks(link: str, nodes: Sequence[str]) -> tuple[LinkedRank, ...]:
    """The ranks of a replica over these nodes, head first."""
    if link not in LINKS:
        raise UsageError(f"there is no link {link!r}.", f"Known: {', '.join(LINKS)}.")
    return LINKS[link](nodes)

"""How vLLM cuts the KV cache into blocks that layers of several kinds share.

Where all layers keep every token, one block holds its tokens of all of them. Otherwise kinds of layers form groups of
equal size, and a block holds one page for each layer of a group. All pages are equally large: kinds with smaller ones
put more tokens into a page (`unify_kv_cache_spec_page_size`), attention beside Mamba or linear attention takes so
many tokens that a page holds a state, and states are padded to it. With prefix caching, vLLM's default, a sequence
holds several pages of states. Read in vLLM 0.32.0; latents and indexes are whole on every tensor rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from corral.plan.contract import EngineSettings, Parallel
from corral.plan.models.facts import ModelFacts
from corral.plan.models.layers import Cache


@dataclass(frozen=True)
class BlockPool:
    """What a block is and how many a request of full length takes."""

    needed: int
    block_bytes: int  # of all layers that share a block, on one GPU that has them all
    group: int  # layers that share it


def pool_of(
    model: ModelFacts,
    settings: EngineSettings,
    max_model_len: int,
    parallel: Parallel,
    element: float,
    drafting: int = 0,
) -> BlockPool:
    """The pool of one layout. Where there are windows, layers of a draft are more layers without one."""
    size, tensor = settings.block_size, parallel.tensor
    whole = -(-max_model_len // size)
    tokens = [one for one in model.caches if one.width]
    pages = {one: int(size * one.token_bytes(element, tensor)) for one in tokens}
    if any(one.kind == "compressed" for one in tokens):
        return _compressed(tokens, element, size, max_model_len)
    states = [one for one in model.caches if one.state_bytes]
    if not states and not any(one.window for one in tokens):
        return BlockPool(whole, sum(page * one.layers for one, page in pages.items()), model.layers)
    page = max(pages.values(), default=0)
    state = max((-(-one.state_bytes // tensor) for one in states), default=0)
    if state and page:
        page *= ceil(state / page)
    page = page or state
    kinds = _kinds(tokens, {one: size * (page // pages[one]) for one in tokens}, settings, parallel, max_model_len)
    rows = [(layers + (drafting if index == 0 else 0), blocks) for index, (layers, blocks) in enumerate(kinds)]
    rows += [(one.layers, one.copies) for one in states]
    few, many = min(n for n, _ in rows), max(n for n, _ in rows)
    group = many if many < few * 1.5 else few
    return BlockPool(sum(-(-layers // group) * blocks for layers, blocks in rows), page * group, group)


def _kinds(
    tokens: list[Cache], sizes: dict[Cache, int], settings: EngineSettings, parallel: Parallel, max_model_len: int
) -> Iterator[tuple[int, int]]:
    """Layers of each kind and the blocks that a full-length request has of it; those that keep all tokens first."""
    steps = parallel.pipeline + settings.async_scheduling  # whose tokens are not settled yet
    in_flight = steps * settings.max_num_batched_tokens
    for cache in sorted(tokens, key=lambda one: bool(one.window)):
        if not cache.window:
            yield cache.layers, -(-max_model_len // sizes[cache])
        elif cache.kind == "chunked":
            yield cache.layers, -(-min(cache.window + in_flight, max_model_len) // sizes[cache])
        else:
            held = min(cache.window - 1 + in_flight, max_model_len)
            yield cache.layers, -(-held // sizes[cache]) + 1


def _compressed(tokens: list[Cache], element: float, size: int, max_model_len: int) -> BlockPool:
    """Windows and compressed entries of DeepSeek-V4 side by side: an estimate, as if a block held a share of each."""
    held = sum(
        one.layers * one.token_bytes(element) * min(one.window or max_model_len, max_model_len) for one in tokens
    )
    whole = -(-max_model_len // size)
    return BlockPool(whole, max(1, ceil(held / whole)), sum(one.layers for one in tokens))

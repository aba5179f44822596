"""Who gets a folder from whom, and who sees the same storage: decided, purely, before anything moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def plan_sources(
    receivers: Sequence[str], have_bytes: Mapping[str, int], heads: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Whom each receiver asks, best first: the one before it in its chain, then those before that, then other heads.

    One chain per head (somebody who has everything). Nobody is the first choice of two, and nobody is ever asked
    by somebody before it in the chain, so no two can wait for each other. Who has most goes first, to be ahead of
    those behind it. Without a head the first receiver asks nobody: its bytes are pushed.
    """
    order = sorted(receivers, key=lambda host: -have_bytes.get(host, 0))
    if not heads:
        return {host: tuple(reversed(order[:number])) for number, host in enumerate(order)}
    chains: list[list[str]] = [[head] for head in heads]
    plan = {}
    for number, host in enumerate(order):
        chain = chains[number % len(chains)]
        others = [head for head in heads if head != chain[0]]
        plan[host] = (*reversed(chain), *others)
        chain.append(host)
    return plan


def same_storage(seen: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Groups of hosts that see one storage, from who saw whose file; in the order given."""
    groups: list[set[str]] = []
    for host, others in seen.items():
        joined = {host, *others}
        for group in [group for group in groups if group & joined]:
            joined |= group
            groups.remove(group)
        groups.append(joined)
    order = list(seen)
    ranked = [tuple(sorted((host for host in group if host in seen), key=order.index)) for group in groups]
    return sorted((group for group in ranked if group), key=lambda group: order.index(group[0]))

"""Who gets a request, and who is next: the gateway's decisions, without a server."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.base.errors import UsageError
from corral.serve.fleet.record import Judgement
from corral.serve.gateway import policies
from corral.serve.gateway.large_json import BadBodyError
from corral.serve.gateway.member import FIRST_STALL_S, LEAST_STALL_S, MemberProgress, judge, relative_speed
from corral.serve.gateway.policies import POLICIES, make_policy
from corral.serve.gateway.prompt import (
    POSITIONS,
    Holdings,
    RoutedPrompt,
    SharedBeginnings,
    TokenScale,
    block_hashes,
    find_usage,
    read_prompt,
)
from corral.serve.gateway.queue import FairQueue


@dataclass
class Server:
    """A member as a policy sees it."""

    name: str
    work_tokens: float = 0.0
    recent: float = 0.0
    holdings: Holdings = field(default_factory=Holdings)

    def give(self, prompt: RoutedPrompt) -> None:
        saved = prompt.tokens_until(self.holdings.depth(prompt.blocks))
        self.holdings.hold(prompt.blocks, prompt.tokens - saved)


def scaled(_: str | None) -> TokenScale:
    return TokenScale()


def ask(**body: Any) -> RoutedPrompt:
    return read_prompt(json.dumps({"model": "m", "max_tokens": 16, **body}).encode(), scaled)


def text_of(subject: str, size: int = 4000) -> str:
    return (subject + " ") * (size // (len(subject) + 1))


# Prompts


def test_prompts_that_begin_alike_have_the_same_first_hashes() -> None:
    one, two = ask(prompt=text_of("alpha") + "and one"), ask(prompt=text_of("alpha") + "or two")
    same = [a == b for a, b in zip(one.blocks, two.blocks, strict=False)]
    assert same.count(True) >= 20
    assert same == sorted(same, reverse=True)  # once different, always different
    assert ask(prompt=text_of("beta")).blocks[0] != one.blocks[0]
    assert ask(prompt=text_of("alpha"), tools=[{"type": "function"}]).blocks[0] != one.blocks[0]


def test_token_ids_are_routed_by_the_ids_and_counted_exactly() -> None:
    ids = list(range(1000, 1600))
    one = ask(prompt=ids)
    assert one.tokens == 600
    assert one.tokens_until(len(one.blocks)) <= 600
    close = read_prompt(b'{"model": "m", "prompt": [' + b",  ".join(b"%d" % i for i in ids[:500]) + b", 7]}", scaled)
    assert close.blocks[:10] == one.blocks[:10]  # however the list is written
    assert ask(prompt=[ids[::-1]]).blocks[0] != one.blocks[0]  # of equal length, and not the same
    several = ask(prompt=[ids, [1, 2]], n=3)
    assert (several.width, several.tokens, several.blocks) == (6, 602, one.blocks)


def test_chats_texts_and_lists_of_texts_are_understood() -> None:
    chat = ask(messages=[{"role": "system", "content": text_of("rules")}, {"role": "user", "content": "hi"}])
    longer = ask(messages=[{"role": "system", "content": text_of("rules")}, {"role": "user", "content": "ho"}])
    assert chat.blocks[:20] == longer.blocks[:20]
    assert ask(prompt=["one", "two"]).width == 2
    assert ask(input="to embed").tokens > 0
    assert ask(max_tokens=7).output_tokens == 7
    assert ask(max_tokens="many").output_tokens == TokenScale().output_tokens
    assert read_prompt(b'{"model": null}', scaled).model is None
    for bad in (b"", b"[1]", b'{"model"', b'"text"', b"\xff\xfe"):
        with pytest.raises(BadBodyError):
            read_prompt(bad, scaled)


def test_the_scale_of_tokens_is_learned() -> None:
    scale = TokenScale()
    for _ in range(200):
        scale.learn(1000, 500)
        scale.learn(10, 9)  # too short to say anything
    assert scale.per_byte == pytest.approx(0.5, rel=0.01)


@given(st.binary(max_size=6000), st.binary(max_size=300))
def test_a_longer_prompt_has_the_hashes_of_its_beginning(start: bytes, more: bytes) -> None:
    short, long = block_hashes(start, 0), block_hashes(start + more, 0)
    assert long[: len(short)] == short
    assert len(short) == sum(position <= len(start) for position in POSITIONS)


# Who holds what


def test_holdings_are_bounded_and_forget_the_oldest() -> None:
    held = Holdings(limit=100)
    for number in range(1000):
        held.hold([number * 10 + i for i in range(10)], 100)
    assert len(held) <= 200
    assert held.depth([9990 + i for i in range(10)]) == 10
    assert held.depth(list(range(10))) == 0


def test_what_was_computed_long_ago_is_not_held() -> None:
    held = Holdings()
    held.capacity_tokens = 1000
    held.hold([1, 2, 3], 300)
    held.hold([4], 900)
    assert held.depth([1, 2, 3]) == 3
    held.hold([5], 200)
    assert held.depth([1, 2, 3]) == 0
    held.forget()
    assert held.depth([5]) == 0


def test_a_miss_that_was_expected_to_be_a_hit_shrinks_the_cache_and_a_hit_widens_it() -> None:
    held = Holdings()
    held.learn(5000, cached=False)
    assert held.capacity_tokens == 5000
    held.learn(100, cached=False)  # one odd answer does not end all affinity
    assert held.capacity_tokens == 3750
    held.learn(8000, cached=True)
    assert held.capacity_tokens == 8000


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), max_size=40))
def test_depth_is_that_of_the_longest_beginning_seen(prompts: list[list[int]]) -> None:
    held, seen = Holdings(), set()
    for words in prompts:
        chain = [hash(tuple(words[: i + 1])) for i in range(len(words))]
        assert held.depth(chain) == next((i for i, one in enumerate(chain) if one not in seen), len(chain))
        held.hold(chain, len(chain))
        seen |= set(chain)


def test_a_beginning_counts_as_shared_when_nearly_all_have_it() -> None:
    shared = SharedBeginnings()
    for number in range(100):
        shared.note([1, 2, 100 + number] if number % 10 else [7, 8], members=16)
    assert shared.note([1, 2, 3], members=16) == 2
    assert shared.note([7, 8], members=16) == 0
    assert shared.note([1, 2, 3], members=1) == 0  # nobody to tell apart
    for number in range(600):  # the window moves on
        shared.note([500 + number], members=16)
    assert shared.note([1, 2, 3], members=16) == 0


# Policies


def test_a_prompt_goes_to_who_holds_it_until_that_one_has_more_to_do() -> None:
    policy, a, b = make_policy("prefix"), Server("a"), Server("b")
    prompt = ask(prompt=text_of("alpha"))
    first = policy.choose([a, b], prompt)
    first.give(prompt)
    other = b if first is a else a
    assert policy.choose([a, b], prompt) is first
    first.work_tokens = 1900.0  # less than twice the thousand tokens it saves
    assert policy.choose([a, b], prompt) is first
    first.work_tokens = 2100.0
    assert policy.choose([a, b], prompt) is other
    other.work_tokens = 1100.0  # what counts is the difference
    assert policy.choose([a, b], prompt) is first
    assert policy.choose([a, b], ask(prompt=text_of("beta"))) is other  # new to both: who has computed less


def test_a_system_prompt_of_all_draws_nobody() -> None:
    policy, servers = make_policy("prefix"), [Server(str(i)) for i in range(4)]
    chosen = []
    for number in range(400):
        prompt = ask(prompt=text_of("You are helpful.", 8000) + f"question {number}")
        server = policy.choose(servers, prompt)
        server.give(prompt)
        chosen.append(server.name)
    late = [chosen[100:].count(str(i)) for i in range(4)]
    assert max(late) <= 1.2 * sum(late) / 4


def test_hot_prefixes_are_kept_together_and_the_load_apart() -> None:
    """Sixteen servers, requests of equal length that each run until sixty-four others have come."""
    rng, policy, servers = random.Random(5), make_policy("prefix"), [Server(str(i)) for i in range(16)]
    prompts = [ask(prompt=text_of(f"subject {i}", 3000)) for i in range(64)]
    weights = [1 / (i + 1) for i in range(64)]
    running: list[tuple[Server, float]] = []
    hits = total = 0.0
    counts = dict.fromkeys((one.name for one in servers), 0)
    for prompt in rng.choices(prompts, weights, k=6000):
        server = policy.choose(servers, prompt)
        saved = prompt.tokens_until(server.holdings.depth(prompt.blocks))
        cost = prompt.tokens - saved + 4 * 64
        server.give(prompt)
        server.work_tokens += cost
        running.append((server, cost))
        if len(running) > 256:
            done, spent = running.pop(0)
            done.work_tokens -= spent
        counts[server.name] += 1
        hits, total = hits + saved, total + prompt.tokens
    assert max(counts.values()) <= 1.2 * 6000 / 16
    assert hits / total > 0.9


def test_conversations_on_an_idle_fleet_stay_where_they_are() -> None:
    """Also when one has most of the requests: nobody waits, so nothing is gained by computing it once more."""
    policy, servers = make_policy("prefix"), [Server(str(i)) for i in range(2)]
    alpha, beta = ask(prompt=text_of("alpha")), ask(prompt=text_of("beta"))
    for prompt in (alpha, beta):
        policy.choose(servers, prompt).give(prompt)
    places = [policy.choose(servers, prompt) for prompt in (alpha, beta)]
    assert places[0] is not places[1]
    places[0].holdings.clock += 5000  # who has computed least is the other one
    for _ in range(100):
        for prompt, place, times in ((alpha, places[0], 7), (beta, places[1], 3)):
            assert {policy.choose(servers, prompt).name for _ in range(times)} == {place.name}


def test_who_was_full_when_the_weights_began_anew_is_not_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "LARGEST", 1e30)
    policy, servers = make_policy("prefix"), [Server(str(i)) for i in range(4)]
    prompts = [ask(prompt=text_of(f"subject {i}")) for i in range(64)]
    rng = random.Random(3)

    def load(free: list[Server], requests: int) -> list[str]:
        chosen = []
        for _ in range(requests):
            for server in servers:
                server.work_tokens = 300.0
            server = policy.choose(free, prompt := rng.choice(prompts))
            server.give(prompt)
            chosen.append(server.name)
        return chosen

    before = policy._divided_by  # type: ignore[attr-defined]
    load(servers, 12_000)
    while policy._divided_by == before:  # type: ignore[attr-defined]
        load(servers[:3], 1)  # the last one is full
    late = load(servers, 2000)
    assert late.count("3") > 2000 / 4 * 0.8
    assert max(server.recent for server in servers) < 1e29  # all have begun anew


def test_the_other_policies() -> None:
    a, b = Server("a", work_tokens=5), Server("b")
    prompt = ask(prompt="x")
    assert make_policy("least-work").choose([a, b], prompt) is b
    turns = make_policy("round-robin")
    assert [turns.choose([a, b], prompt).name for _ in range(4)] == ["a", "b", "a", "b"]
    assert {make_policy("random").choose([a, b], prompt).name for _ in range(100)} == {"a", "b"}
    for name in POLICIES:
        assert make_policy(name).choose([a], prompt) is a
    with pytest.raises(UsageError) as refused:
        make_policy("prefx")
    assert "prefix" in refused.value.remedy


# Fair share


def test_a_batch_does_not_starve_a_chat() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push("batch", f"b{number}", 100)
    order = []
    for turn in range(20):
        if turn == 5:
            queue.push("chat", "c0", 100)
        item = queue.pop()
        assert item
        order.append(item)
        queue.served("chat" if item == "c0" else "batch", 100)
    assert "c0" in order[5:7]
    assert [one for one in order if one != "c0"] == [f"b{i}" for i in range(19)]


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(400):
        queue.push("long", ("long", number), 1000)
        queue.push("short", ("short", number), 100)
    spent = {"long": 0, "short": 0}
    for _ in range(220):
        item = queue.pop()
        assert item
        cost = 1000 if item[0] == "long" else 100
        queue.served(item[0], cost)
        spent[item[0]] += cost
    assert 0.9 < spent["long"] / spent["short"] < 1.1


def test_who_was_away_has_no_claim_on_the_past_and_no_debt_either() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.served("early", 1000)  # alone, without a queue
    for number in range(10):
        queue.push("late", f"late{number}", 1000)
        queue.push("early", f"early{number}", 1000)
    taken = []
    for _ in range(10):
        item = queue.pop()
        assert item
        taken.append(item.rstrip("0123456789"))
        queue.served(taken[-1], 1000)
    assert 4 <= taken.count("early") <= 6


def test_who_leaves_the_queue_and_who_comes_back_to_its_head() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a", "b", "c"):
        queue.push("key", name, 1)
    queue.remove("key", "b")
    queue.remove("key", "b")
    assert queue.waiting() == {"key": 2}
    first = queue.pop()
    assert first == "a"
    queue.put_back("key", first, 1)
    assert queue.oldest() == ["a"]
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a", "c", None]
    assert len(queue) == 0


# Judging


def test_a_member_with_work_that_does_not_move_is_hung_by_its_own_measure() -> None:
    quick = MemberProgress()
    quick.busy(100.0)
    assert judge(quick, 100.0 + FIRST_STALL_S - 1) is Judgement.OK
    assert judge(quick, 100.0 + FIRST_STALL_S + 1) is Judgement.HUNG  # it never moved
    for step in range(100):
        quick.moved(100.0 + step * 0.05)
    assert judge(quick, 104.95 + LEAST_STALL_S - 1) is Judgement.OK
    assert judge(quick, 104.95 + LEAST_STALL_S + 1) is Judgement.HUNG
    slow = MemberProgress()
    slow.busy(100.0)
    for step in range(10):
        slow.moved(100.0 + step * 6.0)
    assert judge(slow, 154.0 + 50) is Judgement.OK
    assert judge(slow, 154.0 + 70) is Judgement.HUNG
    slow.idle()
    assert judge(slow, 1000.0) is Judgement.OK  # it has nothing to do
    assert judge(slow, 1000.0, reachable=False) is Judgement.GONE


def test_a_pause_without_work_is_no_pause() -> None:
    progress = MemberProgress()
    progress.busy(0.0)
    for step in range(10):
        progress.moved(step * 0.1)
    progress.idle()
    progress.busy(500.0)
    progress.moved(500.1)
    assert progress.longest_pause_s < 1


def test_far_behind_the_others_is_slow() -> None:
    assert relative_speed(10, [100, 110, 90]) == pytest.approx(0.1)
    assert relative_speed(200, [100, 110]) == 1.0
    assert relative_speed(0, [100]) == 1.0  # it had nothing to do
    assert judge(MemberProgress(), 0.0, relative_speed(10, [100, 90])) is Judgement.SLOW


# Usage


def test_usage_is_found_at_the_end_only_where_it_is_one() -> None:
    whole = b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}],"usage":{"prompt_tokens":120,'
    whole += b'"total_tokens":130,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":112}}}'
    found = find_usage(whole)
    assert found
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (120, 10, 112)
    assert find_usage(b'data: {"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}]}\n\ndata: [DONE]') is None
    assert find_usage(b'"usage":null}\n\n') is None
    bare = find_usage(b'"usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": null}')
    assert bare
    assert bare.cached_tokens is None


@pytest.mark.parametrize(
    "tail",
    [
        b'{"output":[{"text":"x"}],"usage":{"input_tokens":31,"input_tokens_details":{"cached_tokens":16},'
        b'"output_tokens":7,"total_tokens":38},"user":null}',
        b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":31,"output_tokens":7,'
        b'"cached_tokens":16}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
)
def test_usage_of_responses_and_messages(tail: bytes) -> None:
    found = find_usage(tail)
    assert found
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (31, 7, 16)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_each_shape_names_its_longest_answer(name: str) -> None:
    read = read_prompt(b'{"model":"m","input":"x","%s":50}' % name.encode(), scaled)
    assert read.output_tokens == 50

"""The settings of a plan, and what else vLLM offers, judged for the stated load: why, what it is worth, when it pays.

Pure. The figures come from the same roofline as the plan's. `gains` compares each setting with vLLM's own default of
it alone. `judge` says of each further feature whether it is on, and when it pays. Nothing that changes answers is
turned on unasked (a narrower KV cache), and nothing whose gain depends on the text (speculation): for those the
condition is worked out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from corral.engines.settings import vllm_defaults
from corral.plan.candidate import Candidate, Tuning, is_large
from corral.plan.contract import EngineSettings, Goal, Judged
from corral.plan.draft import Draft, DraftMethod
from corral.plan.hardware.inventory import GIB, Gpu, Inventory
from corral.plan.memory import measure
from corral.plan.models.facts import ModelFacts
from corral.plan.settings import WHOLE_PROMPTS, Fixed, largest_graph, most_by_itself, own_largest
from corral.plan.speed import Roof, predict, roof_of

AS_SET = "as set"  # with --set, with a flag of the engine, or by a profile
Row = tuple[str, object, str]  # field, value, because


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def setting_reasons(chosen: Candidate, inventory: Inventory, goal: Goal, fixed: Fixed) -> list[Row]:
    """Why each setting has its value."""
    s = chosen.settings
    rows: list[Row] = []
    if inventory.gpu is not None:
        outside = inventory.memory_bytes_per_gpu - chosen.memory.budget_bytes_per_gpu
        share = f"vLLM's default; {gib(outside)} per GPU stay outside its budget"
        rows.append(("gpu_memory_utilization", s.gpu_memory_utilization, share))
    batched = {
        "latency": "small prefill chunks keep running requests smooth",
        "balanced": "vLLM's default for this memory size",
        "throughput": "large prefill chunks use the matrix units best",
    }[goal.goal]
    if goal.goal == "balanced" and s.max_num_batched_tokens > 8192:
        batched = "as many prompts begin as answers end, and their tokens would not fit a step of 8,192"
    seqs = "vLLM's default for this memory size"
    if goal.concurrency and goal.concurrency > s.max_num_seqs:
        seqs = f"of the {goal.concurrency:,} requests at once you asked for, so many run and the others wait"
    elif goal.concurrency:
        seqs = f"room for the {goal.concurrency} requests at once you asked for; smaller means more KV cache"
    rows += [("max_num_batched_tokens", s.max_num_batched_tokens, batched), ("max_num_seqs", s.max_num_seqs, seqs)]
    graphs = "kernels are launched one by one" if s.eager else "CUDA graphs: small models gain most"
    rows.append(("eager", str(s.eager).lower(), graphs if inventory.gpu else "the engine decides on a CPU"))
    if inventory.gpu is not None:
        rows.append(("api_servers", s.api_servers, _api_servers(chosen, inventory)))
        rows.append(("stream_interval", s.stream_interval, _interval(s)))
        rows += [_graph_size(s, inventory.kind)] if not s.eager else []
        rows.append(("async_scheduling", str(s.async_scheduling).lower(), _scheduling(s)))
    rows = [
        (name, value, f"{AS_SET}; {why}" if getattr(fixed, name) is not None else why) for name, value, why in rows
    ]
    return rows + [(name, value, AS_SET) for name, value in fixed.passed_on.items()]


def _interval(s: EngineSettings) -> str:
    if s.stream_interval == 1:
        return "every token is streamed as it comes; with --goal throughput and a fast stream, four together"
    return "so many tokens are streamed together, which the API servers notice; the first comes at once"


def _graph_size(s: EngineSettings, gpu: Gpu | None) -> Row:
    launched = "a step of more tokens takes as long as its launches at least"
    largest = largest_graph(s, gpu)
    if s.max_graph_size:
        return "max_graph_size", largest, f"{launched}, and vLLM's own end at {own_largest(s, gpu)}"
    return "max_graph_size", largest, f"vLLM's own: twice max_num_seqs, at most {most_by_itself(gpu)}; {launched}"


def _scheduling(s: EngineSettings) -> str:
    if s.async_scheduling:
        return "vLLM's default: the next step is scheduled while the GPU computes this one"
    return "each step is scheduled when the one before it has ended"


def _api_servers(chosen: Candidate, inventory: Inventory) -> str:
    count = chosen.settings.api_servers
    if chosen.parallel.data > 1 and count == chosen.parallel.data:
        return "one process for each replica, vLLM's default"
    if count == 1:
        return "one process streams all that this load asks for, or all that the cores leave room for"
    cores = f" on {inventory.cpu_cores} cores" if inventory.cpu_cores else ""
    return f"one process{cores} streams 9,000 to 16,000 tokens a second, and the GPU would wait for it"


def gains(model: ModelFacts, inventory: Inventory, chosen: Candidate, goal: Goal, tuning: Tuning) -> dict[str, float]:
    """The relative gain in throughput of each setting that is not vLLM's default."""
    now = chosen.speed.throughput_tokens_per_s
    if inventory.kind is None or not now or chosen.problem:
        return {}
    asked = goal.concurrency or chosen.speed.concurrency

    def speed(settings: EngineSettings) -> float:
        shape = (model, inventory, chosen.parallel, chosen.precision, settings, chosen.memory)
        return predict(*shape, goal, asked, tuning.speed).throughput_tokens_per_s or 0.0

    found = {}
    for field, default in vllm_defaults(is_large(inventory), chosen.parallel.data).items():
        if getattr(chosen.settings, field) != default:
            other = speed(replace(chosen.settings, **{field: default}))  # type: ignore[arg-type]
            if other:
                found[field] = round(now / other - 1, 3)
    return found


DRAFTED = 3  # tokens that are drafted in each step
TYPICAL = 0.6  # share of drafted tokens that is accepted where speculation suits the text; assumed, not measured
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
EAGLE = '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}'


def judge(
    model: ModelFacts, inventory: Inventory, chosen: Candidate, goal: Goal, tuning: Tuning
) -> tuple[Judged, ...]:
    """Every one of them, for hardware whose speed is known."""
    gpu = inventory.kind
    if gpu is None or chosen.problem or not model.writes:
        return ()
    roof = roof_of(model, inventory, chosen.parallel, chosen.precision, chosen.settings, tuning.speed)
    running = max(1, chosen.speed.concurrency // chosen.parallel.data)
    return (
        *_speculation(roof, running, goal, tuning),
        _narrow_cache(model, inventory, gpu, chosen, goal, tuning),
        _prefix_caching(roof, running, chosen, goal),
        _chunked_prefill(roof, chosen, goal),
    )


def needed_acceptance(dearer: float, drafted: int = DRAFTED) -> float | None:
    """The share of drafted tokens that must be accepted where a step takes so many times as long; None: no share."""
    if dearer >= drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(middle, drafted) < dearer else (low, middle)
    return high


def _tokens(accepted: float, drafted: int) -> float:
    """Tokens of one step: its own, and the drafted ones up to the first that is refused."""
    return sum(accepted**at for at in range(drafted + 1))


def _speculation(roof: Roof, running: int, goal: Goal, tuning: Tuning) -> Iterator[Judged]:
    """What the arguments name, and what they might."""
    length = goal.prompt_tokens + goal.output_tokens / 2
    plain = roof.step(running, length)
    repeats = "answers repeat their prompts (code edits, extraction, summaries)"
    ways = [("ngram", tuning.ngram, 0.0, NGRAM, repeats)]
    if tuning.draft is not None:
        yield _named(roof, running, length, tuning.draft)
    elif not tuning.ngram:
        ways.append(("EAGLE", 0, DRAFTED * roof.draft_s(), EAGLE, "there is a draft trained for this model"))
    for way, asked, drafting, config, text in ways:
        drafted = asked or DRAFTED
        dearer = (roof.step(running, length, drafted) + drafting) / plain
        needed = needed_acceptance(dearer, drafted)
        gain = _tokens(TYPICAL, drafted) / dearer - 1
        cost = (
            f"a step that checks {drafted} drafted tokens takes {dearer:.2f} × as long at {running} requests at once"
        )
        if needed is None:
            pays = f"fewer requests run at once: at {running} no share of accepted tokens is enough"
        else:
            pays = f"{text}, and more than {needed:.0%} of the drafted tokens are accepted"
        yield Judged(f"speculative decoding, {way}", bool(asked),
                     f"{cost}; with {TYPICAL:.0%} of them accepted {gain:+.0%}", pays, round(gain, 3),
                     () if asked else ("--speculative-config", config))  # fmt: skip


def _named(roof: Roof, running: int, length: float, draft: Draft) -> Judged:
    """The draft that the user names: what it costs by its own size."""
    drafted = draft.drafted or DRAFTED
    read = draft.weights_bytes + (roof.head_bytes() if draft.method is DraftMethod.EAGLE else 0)  # shared, but read
    drafting = drafted * roof.named_draft_s(read, draft.layers)
    dearer = (roof.step(running, length, drafted) + drafting) / roof.step(running, length)
    needed, gain = needed_acceptance(dearer, drafted), _tokens(TYPICAL, drafted) / dearer - 1
    layers = f" and {draft.kv_layers} more of its layers in each block" if draft.kv_layers else ""
    size = f"its {draft.weights_bytes / GIB:.2f} GiB{layers} are taken from the KV cache"
    cost = f"{size}; a step that drafts and checks {drafted} tokens takes {dearer:.2f} × as long at {running} at once"
    pays = (
        f"fewer requests run at once: at {running} no share of accepted tokens is enough"
        if needed is None
        else f"more than {needed:.0%} of the drafted tokens are accepted"
    )
    because = f"{cost}; with {TYPICAL:.0%} of them accepted {gain:+.0%}"
    return Judged(f"speculative decoding, {draft.name}", True, because, pays, round(gain, 3))


def _narrow_cache(
    model: ModelFacts, inventory: Inventory, gpu: Gpu, chosen: Candidate, goal: Goal, tuning: Tuning
) -> Judged:
    taken = chosen.precision.kv != "auto"
    other = replace(chosen.precision, kv="auto" if taken else "fp8")
    shape = (model, inventory, chosen.parallel, other, chosen.settings)
    memory = measure(*shape, chosen.max_model_len, tuning.memory, tuning.draft)
    asked = goal.concurrency or chosen.speed.concurrency
    speed = predict(*shape, memory, goal, asked, tuning.speed).throughput_tokens_per_s
    now = chosen.speed.throughput_tokens_per_s
    gain = None if not speed or not now else round((now / speed if taken else speed / now) - 1, 3)
    seats = chosen.memory.kv_cache_tokens // (goal.prompt_tokens + goal.output_tokens)
    room = f"the KV cache holds {seats:,} requests of this length, and {asked:,} are to run at once"
    room += f": {gain:+.0%}" if gain is not None else ""
    native = "" if gpu.fp8_tflops else f"; {gpu.kind} converts it, having no FP8 of its own"
    return Judged("fp8 KV cache", taken, f"half the bytes of each token; attention loses a little; {room}{native}",
                  f"more than {seats:,} requests of this length run at once, or contexts are long", gain,
                  ("--kv-cache-dtype", "auto" if taken else "fp8"))  # fmt: skip


def _prefix_caching(roof: Roof, running: int, chosen: Candidate, goal: Goal) -> Judged:
    prompts = running * goal.prompt_tokens / roof.prefill_rate(goal.prompt_tokens)
    steps = goal.output_tokens * roof.step(running, goal.prompt_tokens + goal.output_tokens / 2)
    half = prompts / (prompts + steps) / 2
    gain, block = 1 / (1 - half) - 1, chosen.settings.block_size
    return Judged("prefix caching", True, f"vLLM's default; prompts are {2 * half:.0%} of the work at this load, and "
                  "what begins alike is computed once; without shared beginnings it costs next to nothing",
                  f"prompts share their first {block} tokens or more; with half of each shared {gain:+.0%}",
                  round(gain, 3), ("--no-enable-prefix-caching",))  # fmt: skip


def _chunked_prefill(roof: Roof, chosen: Candidate, goal: Goal) -> Judged:
    longest, chunk = chosen.max_model_len, chosen.settings.max_num_batched_tokens
    whole_ms, part_ms = (1000 * roof.chunk(min(size, longest), longest) for size in (longest, chunk))
    one = "one chunk" if goal.prompt_tokens <= chunk else f"{-(-goal.prompt_tokens // chunk)} chunks"
    pauses = (
        f"one of {longest:,} would stop all other answers for {whole_ms:,.0f} ms, a chunk does for {part_ms:,.0f}"
    )
    return Judged("chunked prefill", True,
                  f"vLLM's default; a prompt of {goal.prompt_tokens:,} tokens is {one}; {pauses}",
                  f"prompts longer than {chunk:,} tokens come while others are answered", None,
                  (WHOLE_PROMPTS, "--max-num-batched-tokens", str(max(longest, chunk))))  # fmt: skip

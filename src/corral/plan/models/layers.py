"""The layers of a model as parts that can be counted: matrices with the name they have in a checkpoint, and caches.

A layer is a mixer (attention with key-value heads, a latent of MLA, linear attention, Mamba, a convolution), or two
side by side, and a feed-forward part (dense, experts, both, none). Each knows its matrices and what it keeps: so many
numbers for each token, for the tokens of a window, or a state for each sequence. Where a matrix lies says `part`, a
field of `Parts`; how it is stored is the business of `quantisation`, which goes by names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Parts:
    """A number (parameters or bytes) split as vLLM spreads it; layer parts are sums over all layers."""

    embedding: int = 0
    head: int = 0
    query_output: int = 0  # by heads
    key_value: int = 0  # by KV heads; copied where there are more ranks than heads
    mlp: int = 0  # by width; shared experts too
    small: int = 0  # norms, biases, routers: on every tensor rank
    experts: int = 0  # routed experts: over all ranks of an engine, its data-parallel ones included
    mixer: int = 0  # linear attention and Mamba, by heads
    copied: int = 0  # matrices that every tensor rank has whole: the latents of MLA, indexers
    tower: int = 0  # vision and audio, on the first stage

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))

    @property
    def layers(self) -> int:
        return self.total - self.embedding - self.head - self.tower


@dataclass(frozen=True)
class Module:
    """The matrices of one name in a layer, or of the model where the name says so."""

    name: str  # below `layers.N.`
    parameters: int
    part: str
    matrix: bool = True  # whether a quantised checkpoint may store it narrow


@dataclass(frozen=True)
class Cache:
    """What the layers of one kind keep for a sequence."""

    kind: str  # full | sliding | chunked | latent | index | compressed | state
    layers: int
    heads: int = 1  # KV heads; a latent and an index have one, which no tensor rank divides
    width: float = 0  # numbers of one token and head, keys and values together
    window: int = 0  # tokens that are kept; 0: all
    element_bytes: float = 0  # of a number, where the engine fixes it; 0: as the KV cache
    state_bytes: int = 0  # of one sequence in one layer, instead of tokens
    copies: int = 0  # of a state that a sequence holds while prefixes are cached: vLLM's default
    expanded: int = 0  # numbers that prompts compute with in place of a token's latent, in all heads

    @property
    def words(self) -> str:
        """What it is, for people."""
        if self.state_bytes:
            return f"{self.layers} layers × {self.state_bytes:,} bytes for each sequence"
        heads = f"{self.heads} heads × " if self.heads > 1 else ""
        kept = f" of the last {self.window:,} tokens" if self.window else ""
        return f"{self.layers} layers × {heads}{self.width:g} numbers{kept}"

    def token_bytes(self, element: float, tensor: int = 1) -> float:
        """Of one token in one layer on one GPU."""
        return max(1, self.heads // tensor) * self.width * (self.element_bytes or element)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention; with a window, all layers of its kind keep only so many tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    kind: str = "full"
    window: int = 0
    bias: bool = False
    out_bias: bool = False
    qk_norm: int = 0  # numbers of both scales
    gate: int = 0  # numbers that gate the output
    shared_kv: bool = False  # values are the keys: one matrix
    keeps: bool = True  # whether it has keys, values and a cache of its own
    sinks: bool = False
    value_dim: int = 0  # of a head; 0: as of the keys
    index_heads: int = 0
    index_dim: int = 0

    def modules(self, hidden: int) -> Iterator[Module]:
        value = self.value_dim or self.head_dim
        queries = self.heads * self.head_dim
        keys, values = (self.kv_heads * one if self.keeps else 0 for one in (self.head_dim, value))
        yield Module("self_attn.q_proj", hidden * (queries + self.gate), "query_output")
        yield Module("self_attn.k_proj", hidden * keys, "key_value")
        if not self.shared_kv:
            yield Module("self_attn.v_proj", hidden * values, "key_value")
        yield Module("self_attn.o_proj", self.heads * value * hidden, "query_output")
        small = self.qk_norm + (queries + keys + values if self.bias else 0) + (hidden if self.out_bias else 0)
        yield Module("self_attn.small", small + (self.heads if self.sinks else 0), "small", False)
        if self.index_heads:
            yield Module("self_attn.indexer", hidden * (self.index_heads + 1) * self.index_dim, "copied")
            yield Module("self_attn.indexer.norms", 2 * self.index_dim, "small", False)

    def caches(self) -> Iterator[Cache]:
        if self.keeps:
            yield Cache(self.kind, 1, self.kv_heads, self.head_dim + (self.value_dim or self.head_dim), self.window)
        if self.index_heads:
            yield Cache("index", 1, 1, self.index_dim, element_bytes=2)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one latent for each token, whatever the number of heads; some have an indexer."""

    heads: int
    rank: int  # of the latent
    query_rank: int  # 0: queries are projected at once
    nope: int
    rope: int
    value: int
    index_heads: int = 0
    index_dim: int = 0

    def modules(self, hidden: int) -> Iterator[Module]:
        queries = self.heads * (self.nope + self.rope)
        if self.query_rank:
            yield Module("self_attn.q_a_proj", hidden * self.query_rank, "copied")
            yield Module("self_attn.q_b_proj", self.query_rank * queries, "query_output")
        else:
            yield Module("self_attn.q_proj", hidden * queries, "query_output")
        yield Module("self_attn.kv_a_proj_with_mqa", hidden * (self.rank + self.rope), "copied")
        yield Module("self_attn.kv_b_proj", self.rank * self.heads * (self.nope + self.value), "query_output")
        yield Module("self_attn.o_proj", self.heads * self.value * hidden, "query_output")
        yield Module("self_attn.small", self.query_rank + self.rank, "small", False)
        if self.index_heads:
            wide = self.index_heads * self.index_dim
            yield Module("self_attn.indexer.wq_b", (self.query_rank or hidden) * wide, "copied")
            yield Module("self_attn.indexer.wk", hidden * self.index_dim, "copied")
            yield Module("self_attn.indexer.weights_proj", hidden * self.index_heads, "copied", False)
            yield Module("self_attn.indexer.k_norm", 2 * self.index_dim, "small", False)

    def caches(self) -> Iterator[Cache]:
        expanded = 0 if self.index_heads else self.heads * (self.nope + self.value)
        yield Cache("latent", 1, 1, self.rank + self.rope, expanded=expanded)
        if self.index_heads:
            yield index_cache(self.index_dim)


def index_cache(dim: int, every: int = 1) -> Cache:
    """Keys of an indexer: FP8, and a scale for each 128 of them."""
    return Cache("index", 1, 1, (dim + 4 * -(-dim // 128)) / every, element_bytes=1)


@dataclass(frozen=True)
class Compressed:
    """DeepSeek-V4's attention: one head of keys that are the values; beyond a window one entry for `ratio` tokens."""

    heads: int
    head_dim: int
    query_rank: int
    out_rank: int
    out_groups: int
    window: int
    ratio: int  # 0: the window alone
    index_heads: int
    index_dim: int

    def modules(self, hidden: int) -> Iterator[Module]:
        queries = self.heads * self.head_dim
        yield Module("attn.wq_a", hidden * self.query_rank, "copied")
        yield Module("attn.wq_b", self.query_rank * queries, "query_output")
        yield Module("attn.wkv", hidden * self.head_dim, "copied")
        yield Module("attn.wo_a", queries * self.out_rank, "query_output")
        yield Module("attn.wo_b", self.out_groups * self.out_rank * hidden, "query_output")
        yield Module("attn.small", self.query_rank + self.head_dim + self.heads, "small", False)
        overlap = 2 if self._indexed else 1
        if self.ratio:
            yield Module("attn.compressor", overlap * (2 * hidden + self.ratio) * self.head_dim, "copied", False)
        if self._indexed:
            yield Module("attn.indexer.wq_b", self.query_rank * self.index_heads * self.index_dim, "copied")
            yield Module("attn.indexer.weights_proj", hidden * self.index_heads, "copied", False)
            wide = overlap * (2 * hidden + self.ratio) * self.index_dim
            yield Module("attn.indexer.compressor", wide, "copied", False)

    @property
    def _indexed(self) -> bool:
        return self.ratio == 4

    def caches(self) -> Iterator[Cache]:
        yield Cache("sliding", 1, 1, self.head_dim, self.window)
        if self.ratio:
            yield Cache("compressed", 1, 1, self.head_dim / self.ratio)
        if self._indexed:
            yield index_cache(self.index_dim, self.ratio)


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta rule, as in Qwen3-Next: a state for each value head, and the last inputs of a convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_element: int

    @property
    def _conv(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def modules(self, hidden: int) -> Iterator[Module]:
        values = self.value_heads * self.value_dim
        yield Module("linear_attn.in_proj_qkv", hidden * self._conv, "mixer")
        yield Module("linear_attn.in_proj_z", hidden * values, "mixer")
        yield Module("linear_attn.in_proj_ba", hidden * 2 * self.value_heads, "mixer", False)
        yield Module("linear_attn.out_proj", values * hidden, "mixer")
        small = self._conv * self.kernel + 2 * self.value_heads + self.value_dim
        yield Module("linear_attn.small", small, "small", False)

    def caches(self) -> Iterator[Cache]:
        conv = 2 * (self.kernel - 1) * self._conv
        state = self.state_element * self.value_heads * self.key_dim * self.value_dim
        yield Cache("state", 1, state_bytes=conv + state, copies=2)


@dataclass(frozen=True)
class DeltaAttention:
    """Kimi's linear attention: the gated delta rule with a decay for each channel."""

    heads: int
    head_dim: int
    kernel: int

    def modules(self, hidden: int) -> Iterator[Module]:
        wide = self.heads * self.head_dim
        yield Module("self_attn.qkv_proj", 3 * hidden * wide, "mixer")
        yield Module("self_attn.o_proj", wide * hidden, "mixer")
        gates = 2 * self.head_dim * (hidden + wide) + hidden * self.heads
        yield Module("self_attn.gates", gates, "mixer", False)
        yield Module("self_attn.small", 3 * wide * self.kernel + wide + self.heads + self.head_dim, "small", False)

    def caches(self) -> Iterator[Cache]:
        wide = self.heads * self.head_dim
        state = 2 * (self.kernel - 1) * 3 * wide + 4 * wide * self.head_dim
        yield Cache("state", 1, state_bytes=state, copies=2)


@dataclass(frozen=True)
class Convolution:
    """A short convolution between two gates, as in LFM2: it keeps the last inputs."""

    kernel: int
    width: int

    def modules(self, hidden: int) -> Iterator[Module]:
        yield Module("conv.in_proj", 3 * hidden * self.width, "mixer")
        yield Module("conv.out_proj", self.width * hidden, "mixer")
        yield Module("conv.small", self.kernel * self.width, "small", False)

    def caches(self) -> Iterator[Cache]:
        yield Cache("state", 1, state_bytes=2 * (self.kernel - 1) * self.width, copies=2)


@dataclass(frozen=True)
class Mamba1:
    """Mamba of the first kind: a state for each channel of its inner width."""

    inner: int
    state: int
    rank: int  # of the step's projection
    kernel: int
    norms: bool = False

    def modules(self, hidden: int) -> Iterator[Module]:
        yield Module("mixer.in_proj", 2 * hidden * self.inner, "mixer")
        yield Module("mixer.x_proj", self.inner * (self.rank + 2 * self.state), "mixer")
        yield Module("mixer.dt_proj", self.rank * self.inner, "mixer")
        yield Module("mixer.out_proj", self.inner * hidden, "mixer")
        small = self.inner * (self.kernel + 3 + self.state) + (self.rank + 2 * self.state if self.norms else 0)
        yield Module("mixer.small", small, "small", False)

    def caches(self) -> Iterator[Cache]:
        yield Cache("state", 1, state_bytes=2 * self.inner * (self.kernel - 1 + self.state), copies=2)


@dataclass(frozen=True)
class Mamba:
    """Mamba 2: a state of heads × head_dim × state, and the last inputs of a convolution."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    state_element: int
    norm: bool = True

    @property
    def _conv(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state

    def modules(self, hidden: int) -> Iterator[Module]:
        inner = self.heads * self.head_dim
        yield Module("mixer.in_proj", hidden * (inner + self._conv + self.heads), "mixer")
        yield Module("mixer.out_proj", inner * hidden, "mixer")
        small = self._conv * (self.kernel + 1) + 3 * self.heads + (inner if self.norm else 0)
        yield Module("mixer.small", small, "small", False)

    def caches(self) -> Iterator[Cache]:
        conv = 2 * (self.kernel - 1) * self._conv
        state = self.state_element * self.heads * self.head_dim * self.state
        yield Cache("state", 1, state_bytes=conv + state, copies=3)  # one more where a prefill stops


Mixer = Attention | Latent | Compressed | LinearAttention | DeltaAttention | Convolution | Mamba1 | Mamba


@dataclass(frozen=True)
class Dense:
    """An MLP: gate, up and down, or up and down."""

    width: int
    matrices: int = 3
    bias: bool = False

    def modules(self, hidden: int) -> Iterator[Module]:
        for name in ("gate_proj", "up_proj", "down_proj")[3 - self.matrices :]:
            yield Module(f"mlp.{name}", hidden * self.width, "mlp")
        if self.bias:
            yield Module("mlp.small", self.width + hidden, "small", False)


@dataclass(frozen=True)
class Experts:
    """Routed experts, of which a token visits some, and shared ones, which all visit."""

    count: int
    per_token: int
    width: int
    shared: int = 0  # width of all shared experts together
    shared_gate: bool = False
    matrices: int = 3
    bias: bool = False
    latent: int = 0  # experts read and write so many numbers instead of the hidden state
    name: str = "mlp"

    def modules(self, hidden: int) -> Iterator[Module]:
        read = self.latent or hidden
        yield Module(f"{self.name}.experts", self.count * self.matrices * read * self.width, "experts")
        if self.latent:
            yield Module(f"{self.name}.latent_proj", 2 * hidden * self.latent, "mlp")
        if self.shared:
            yield Module(f"{self.name}.shared_experts", self.matrices * hidden * self.shared, "mlp")
        small = hidden * self.count + (hidden if self.shared_gate else 0)
        small += self.count * ((self.matrices - 1) * self.width + hidden + 1) if self.bias else 0
        yield Module(f"{self.name}.gate", small, "small", False)

    def visited(self, hidden: int) -> int:
        """Parameters of the routed experts that one token is multiplied with."""
        return min(self.per_token, self.count) * self.matrices * (self.latent or hidden) * self.width


@dataclass(frozen=True)
class ModelLayer:
    """One layer: any part may be missing, and experts may stand beside a dense MLP."""

    mixer: Mixer | None = None
    dense: Dense | None = None
    experts: Experts | None = None
    norms: int = 2
    norm_bias: bool = False
    beside: Mixer | None = None  # a second mixer
    more: int = 0  # parameters that every tensor rank has: gates of a layer's own input, connections between layers

    def modules(self, hidden: int) -> Iterator[Module]:
        for part in (self.mixer, self.beside, self.dense, self.experts):
            if part is not None:
                yield from part.modules(hidden)
        yield Module("norms", self.norms * hidden * (2 if self.norm_bias else 1), "small", False)
        yield Module("more", self.more, "copied", False)


def count_layers(layers: Iterable[ModelLayer], hidden: int) -> Counter[str]:
    """Parameters by part."""
    sums: Counter[str] = Counter()
    for layer, times in Counter(layers).items():
        for module in layer.modules(hidden):
            sums[module.part] += module.parameters * times
    return sums


def caches_of(layers: Iterable[ModelLayer]) -> tuple[Cache, ...]:
    """What all layers keep, one row for each kind."""
    kinds: Counter[Cache] = Counter()
    for layer in layers:
        for mixer in (layer.mixer, layer.beside):
            kinds.update(mixer.caches() if mixer is not None else ())
    return tuple(Cache(**{**vars(one), "layers": number}) for one, number in kinds.items())

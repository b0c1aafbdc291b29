"""The least time that a decode step can take: what must move, and what it computes.

A verify reads the weights of the trunk and the output head once, each draft those of the draft head
and, in 8 bits, the columns of the output head that score its vocabulary. A layer with experts reads
those that some token chose: each expert is as likely as any other, and tokens choose independently.
Keys and values of the context are read by each attention layer and by each draft; layers that share
them write none. A recurrent layer reads its state and writes what it keeps: one after each token
(snapshot), or one now and then, with a ring of tokens beside it (replay). Left out are norms,
logits and rows of embeddings, and what need not leave the chip.

With the sizes of one device of a group (`ModelConfig.local`), all counts are those of that device.
Whole experts are counted as if tokens chose equally many of each device. Sums over the devices are
left out.
"""

import math
from typing import NamedTuple

from jaxspec.models.config import (
    DENSE,
    DENSE_AND_SPARSE,
    DOUBLE_DENSE,
    FULL_ATTENTION,
    KIMI_DELTA,
    LATENT_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA2,
    NO_FEED_FORWARD,
    NO_MIXER,
    PARALLEL,
    SHARED_FULL,
    SHARED_SLIDING,
    SHORT_CONV,
    SLIDING_ATTENTION,
    SPARSE,
    SQUARED_RELU,
    ModelConfig,
)
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig
from jaxspec.models.layers.kimi_delta import KimiDeltaConfig
from jaxspec.models.layers.latent_attention import LatentAttentionConfig
from jaxspec.models.layers.mamba2 import Mamba2Config
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.per_layer_input import PerLayerSizes
from jaxspec.models.layers.short_conv import ShortConvConfig
from jaxspec.models.layers.token_indexer import TokenIndexConfig
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.recurrent.replay import default_window
from jaxspec.plan.step_shapes import StateConfig

MATMUL_FLOPS = 790e12  # a second: what large bfloat16 products reach on an H200
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int4": 0.5}
EVERY = math.inf  # tokens, of which each expert gets some


def attention_size(config: ModelConfig) -> int:
    """Weights of an attention layer, without its feed-forward layer; queries may have a gate."""
    if config.find_part(LatentAttentionConfig) is not None:
        return latent_attention_size(config)
    heads = (2 + config.gated_attention) * config.num_heads
    heads += (2 - config.keys_are_values) * config.num_kv_heads
    return heads * config.head_dim * config.hidden_size


def latent_attention_size(config: ModelConfig) -> int:
    """The same of attention over latents, with its token index if there is one."""
    sizes, index = config.part(LatentAttentionConfig), config.find_part(TokenIndexConfig)
    queries, hidden = config.num_heads * sizes.query_dim, config.hidden_size
    rank = sizes.query_rank
    size = hidden * queries if rank is None else rank * (hidden + queries)
    size += hidden * (sizes.width + config.num_heads * sizes.value_dim)
    size += config.num_heads * (sizes.plain_dim + sizes.value_dim) * sizes.rank
    size += sizes.gated * config.num_heads * hidden
    if index is None:
        return size
    return (
        size + hidden * (index.head_dim + index.heads) + (rank or 0) * index.heads * index.head_dim
    )


def stored_size(config: ModelConfig) -> int:
    """Elements that a token stores in an attention layer."""
    latent, index = config.find_part(LatentAttentionConfig), config.find_part(TokenIndexConfig)
    if latent is None:
        return 2 * config.num_kv_heads * config.head_dim
    return latent.width + (0 if index is None else index.head_dim)


def context_size(config: ModelConfig, context: int) -> int:
    """Elements of a context of so many tokens that a later token's attention layer reads.

    With a token index: the keys of all tokens, and the latents of those that are selected.
    """
    latent, index = config.find_part(LatentAttentionConfig), config.find_part(TokenIndexConfig)
    if latent is None or index is None:
        return context * stored_size(config)
    return context * index.head_dim + min(context, index.top_k) * latent.width


class RecurrentSize(NamedTuple):
    """Sizes of a recurrent layer that the floor counts."""

    features: int  # of its heads' outputs
    channels: int  # of its convolution
    taps: int
    scalars: int  # columns of its projection beside channels and gates: b and a, or step sizes
    # Channels between two matrices, where gates and decays have two each; None if decays have
    # one as wide as the gates, and 0 if they have none.
    rank: int | None
    state: int  # elements of a state
    factors: int  # elements that a token leaves in a ring
    floats: int  # float32 numbers that it leaves there besides

    @staticmethod
    def of(config: ModelConfig, kind: str) -> "RecurrentSize":
        """Return the sizes of the model's recurrent layers of this kind."""
        if kind == KIMI_DELTA:
            kda = config.part(KimiDeltaConfig)
            return RecurrentSize(
                features=kda.channels,
                channels=3 * kda.channels,
                taps=kda.conv_kernel,
                scalars=kda.heads,
                rank=kda.rank,
                state=kda.channels * kda.head_dim,
                factors=2 * kda.channels,
                floats=kda.channels,
            )
        if kind == LINEAR_ATTENTION:
            gdn = config.part(GatedDeltaNetConfig)
            keys = gdn.key_heads * gdn.key_dim
            return RecurrentSize(
                features=gdn.values,
                channels=gdn.conv_dim,
                taps=gdn.conv_kernel,
                scalars=2 * gdn.value_heads,
                rank=0,
                state=gdn.values * gdn.key_dim,
                factors=gdn.values + keys,
                floats=gdn.value_heads,
            )
        heads, taps = config.part(Mamba2Config).heads, config.part(Mamba2Config).conv_kernel
        return RecurrentSize(
            features=heads.features,
            channels=heads.channels,
            taps=taps,
            scalars=heads.heads,
            rank=0,
            state=heads.features * heads.state_dim,
            factors=heads.features + heads.groups * heads.state_dim,
            floats=heads.heads,
        )

    def weights(self, hidden_size: int) -> int:
        """Those of a layer."""
        columns = self.channels + 2 * self.features + self.scalars
        between = 0
        if self.rank is None:
            columns += self.features
        if self.rank:  # instead of the columns of the output gate
            columns += 2 * self.rank - self.features
            between = 2 * self.rank * self.features
        return columns * hidden_size + between + self.taps * self.channels


def mixer_size(config: ModelConfig, kind: str) -> int:
    """Weights of a layer's token mixer."""
    if kind == NO_MIXER:
        return 0
    if kind in (FULL_ATTENTION, LATENT_ATTENTION, SLIDING_ATTENTION):
        return attention_size(config.of_mixer(kind))
    if kind in (SHARED_FULL, SHARED_SLIDING):
        own = config.of_mixer(kind)
        return 2 * own.num_heads * own.head_dim * own.hidden_size
    if kind == SHORT_CONV:
        return config.hidden_size * (4 * config.hidden_size + config.part(ShortConvConfig).taps)
    beside = attention_size(config) if kind == PARALLEL else 0
    return beside + RecurrentSize.of(config, kind).weights(config.hidden_size)


def distinct_experts(routing: Routing, tokens: float) -> float:
    """Return the mean number of a layer's experts that this many tokens choose."""
    return routing.num_experts * (1 - (1 - routing.num_chosen / routing.num_experts) ** tokens)


def feed_forward_size(config: ModelConfig, kind: str, tokens: float) -> float:
    """Weights of a feed-forward layer that so many tokens read."""
    if kind == NO_FEED_FORWARD:
        return 0
    if kind in (matrices := {SQUARED_RELU: 2, DENSE: 3, DOUBLE_DENSE: 6}):
        return matrices[kind] * config.hidden_size * config.intermediate_size
    if kind == DENSE_AND_SPARSE:
        return sum(feed_forward_size(config, part, tokens) for part in (DENSE, SPARSE))
    sizes = config.part(MoEConfig)
    matrices = 1 + sizes.activation.pieces
    chosen = matrices * distinct_experts(sizes.routing, tokens) * sizes.intermediate_size
    chosen /= sizes.holders
    of_stream = sizes.routing.num_experts + sizes.gated_shared + matrices * sizes.shared_size
    if sizes.latent_size is None:
        return config.hidden_size * (of_stream + chosen)
    return config.hidden_size * (of_stream + 2 * sizes.latent_size) + sizes.latent_size * chosen


def head_size(config: ModelConfig, tokens: float) -> float:
    """Weights of the draft head that a pass of so many tokens reads, without the output head."""
    layer = feed_forward_size(config, config.draft_feed_forward_type, tokens)
    return mixer_size(config, config.draft_mixer_type) + layer + 2 * config.hidden_size**2


def output_head_size(config: ModelConfig) -> int:
    """Weights of the output head, whose columns a group's devices share if they can."""
    ids = config.vocab_size
    return config.hidden_size * (ids if ids % config.devices else ids // config.devices)


def per_layer_size(config: ModelConfig) -> int:
    """Weights of the projections of per-layer embeddings, three for each layer."""
    sizes = config.find_part(PerLayerSizes)
    features = 0 if sizes is None else sizes.features
    return 3 * len(config.layer_types) * config.hidden_size * features


def forward_size(config: ModelConfig, tokens: float) -> float:
    """Weights that one pass of so many tokens over the trunk and the output head reads."""
    feed_forward = sum(
        feed_forward_size(config, kind, tokens) for kind in config.feed_forward_types
    )
    mixers = sum(mixer_size(config, kind) for kind in config.layer_types)
    return mixers + feed_forward + per_layer_size(config) + output_head_size(config)


def step_bytes(
    config: ModelConfig,
    *,
    rows: int,
    context: int,
    drafts: int,
    draft_vocab: int | None = None,
    draft_head_dtype: str = "float8_e4m3fn",
    emitted: float,
    states: StateConfig,
    dtype: str = "bfloat16",
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    ring_dtype: str | None = None,
    prompt_tokens: int = 0,
) -> dict[str, float]:
    """Bytes that a step of `rows` requests of `context` tokens must move, by what they are.

    Beside them it may read `prompt_tokens` of prompts, which it writes keys and values of.

    Convolutions count as engines write them that shift a window; our ring moves two inputs a
    channel less, half a percent of the 9B's floor at 64 rows. `draft_vocab`: tokens that a draft
    scores; None: all. `draft_head_dtype`: of the output head, for drafts. `emitted`: tokens a row
    gets on average. `kv_dtype`, `ring_dtype`: None is `dtype`, the states'. `weight_dtype`: of all
    matrices of layers, without their scales; None is `dtype`.
    """
    width, size = 1 + drafts, ITEMSIZES[dtype]
    weight_size = ITEMSIZES[weight_dtype or dtype]
    kv_size = ITEMSIZES[kv_dtype or dtype]
    full = config.of_mixer(FULL_ATTENTION)
    kv_token, read = kv_size * stored_size(full), kv_size * context_size(full, context)
    scored = config.hidden_size * draft_vocab if draft_vocab else output_head_size(config)
    draft = weight_size * head_size(config, rows) if drafts else 0.0
    draft += ITEMSIZES[draft_head_dtype] * scored
    io = state = 0.0
    for kind in (KIMI_DELTA, LINEAR_ATTENTION, MAMBA2, PARALLEL):
        if layers := config.layer_types.count(kind):
            sizes = RecurrentSize.of(config, kind)
            moved = sizes.channels * (width + _window(sizes.taps, drafts))
            moved += 2 * sizes.features * width
            io += rows * layers * size * moved
            state += rows * layers * _state_bytes(sizes, width, emitted, states, ring_dtype)
    if layers := config.layer_types.count(SHORT_CONV):
        window = _window(config.part(ShortConvConfig).taps, drafts)
        # Of each token B, C and v, and the output.
        io += rows * layers * size * config.hidden_size * (4 * width + window)
    attention, shared, sliding, shared_sliding = (
        config.num_full_attention_layers,
        *map(config.layer_types.count, (SHARED_FULL, SLIDING_ATTENTION, SHARED_SLIDING)),
    )
    seen = min(context, config.window or context)  # by a token of a layer with a window
    windows = rows * (sliding * (seen + width) + shared_sliding * seen)
    output_head = output_head_size(config)
    layers = forward_size(config, rows * width + prompt_tokens) - output_head
    return {
        "weights": weight_size * layers + size * output_head,
        "kv": attention * (rows * width + prompt_tokens) * kv_token
        + (attention + shared) * rows * read
        + windows * kv_size * stored_size(config),
        "io": io,
        "states": state,
        "drafts": drafts * (draft + rows * read),
    }


def _window(taps: int, drafts: int) -> int:
    """Inputs of a convolution that are read before a step's own, and written whole behind it."""
    return 2 * (taps - 1) + drafts


def _state_bytes(
    sizes: RecurrentSize, width: int, emitted: float, states: StateConfig, ring_dtype: str | None
) -> float:
    """Bytes that one request moves in one layer, for its state and its ring."""
    size = ITEMSIZES[states.dtype]
    if states.policy == "snapshot":
        return sizes.state * size * (1 + width)
    token = ITEMSIZES[ring_dtype or states.dtype] * sizes.factors + 4 * sizes.floats
    steps_fit = (states.window or default_window(size)) - width + 1
    folds = emitted / (steps_fit + (emitted - 1) / 2)  # a share of the steps
    return sizes.state * size * (1 + folds) + (steps_fit / 2 + width) * token


def step_seconds(
    moved: dict[str, float],
    config: ModelConfig,
    tokens: int,
    bytes_per_second: float,
    prompt_tokens: int = 0,
) -> float:
    """The floor of a step that moves `moved` and verifies `tokens` tokens in all rows together.

    Tokens of prompts have no logits; attention among them is left out.
    """
    weights = forward_size(config, 1)  # a token has no use for others' experts
    without_logits = weights - output_head_size(config)
    flops = 2 * (weights * tokens + without_logits * prompt_tokens)
    return max(sum(moved.values()) / bytes_per_second, flops / MATMUL_FLOPS)

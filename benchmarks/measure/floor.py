"""The least time that a decode step of a Qwen3.5 can take: what must move, and what it computes.

A verify reads the weights of the trunk and the output head once, each draft those of the draft head
and the columns of the output head that score its vocabulary. Keys and values of the context are
read by each attention layer and by each draft. A recurrent layer reads its state and writes what it
keeps: one after each token (snapshot), or one now and then, with a ring of tokens beside it
(replay). Left out are norms and logits, and what need not leave the chip.
"""

from jaxspec.config import StateConfig
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.gated_delta_net import GatedDeltaNetConfig
from jaxspec.pallas.recurrent.replay import default_window

MATMUL_FLOPS = 790e12  # a second: what large bfloat16 products reach on an H200
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def attention_size(config: ModelConfig) -> int:
    """Weights of an attention layer and its feed-forward layer; queries come with a gate."""
    heads = 3 * config.num_heads + 2 * config.num_kv_heads  # queries, gates and the output's
    return heads * config.head_dim * config.hidden_size + _mlp_size(config)


def recurrent_size(config: ModelConfig) -> int:
    """Weights of a Gated DeltaNet layer and its feed-forward layer."""
    sizes = config.part(GatedDeltaNetConfig)
    columns = sizes.conv_dim + 2 * sizes.values + 2 * sizes.value_heads
    taps = sizes.conv_kernel * sizes.conv_dim
    return columns * config.hidden_size + taps + _mlp_size(config)


def _mlp_size(config: ModelConfig) -> int:
    return 3 * config.hidden_size * config.intermediate_size


def forward_size(config: ModelConfig) -> int:
    """Weights that one pass over the trunk and the output head reads."""
    return (
        config.num_full_attention_layers * attention_size(config)
        + config.num_linear_attention_layers * recurrent_size(config)
        + config.hidden_size * config.vocab_size
    )


def step_bytes(
    config: ModelConfig,
    *,
    rows: int,
    context: int,
    drafts: int,
    draft_vocab: int | None = None,
    emitted: float,
    states: StateConfig,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    ring_dtype: str | None = None,
) -> dict[str, float]:
    """Bytes that a step of `rows` requests of `context` tokens must move, by what they are.

    Convolutions count as engines write them that shift a window; our ring moves two inputs a
    channel less, half a percent of the 9B's floor at 64 rows. `draft_vocab`: tokens that a draft
    scores; None: all. `emitted`: tokens a row gets on average. `kv_dtype`, `ring_dtype`: None is
    `dtype`, the states'.
    """
    width, size = 1 + drafts, ITEMSIZES[dtype]
    kv_token = 2 * config.num_kv_heads * config.head_dim * ITEMSIZES[kv_dtype or dtype]
    sizes = config.part(GatedDeltaNetConfig)
    window = 2 * (sizes.conv_kernel - 1) + drafts  # read, and written whole
    io = size * (sizes.conv_dim * (width + window) + 2 * sizes.values * width)
    hidden = config.hidden_size
    head = attention_size(config) + 2 * hidden**2 + hidden * (draft_vocab or config.vocab_size)
    recurrent = rows * config.num_linear_attention_layers
    return {
        "weights": size * forward_size(config),
        "kv": config.num_full_attention_layers * rows * (context + width) * kv_token,
        "io": recurrent * io,
        "states": recurrent * _state_bytes(config, width, emitted, states, ring_dtype),
        "drafts": drafts * (size * head + rows * context * kv_token),
    }


def _state_bytes(
    config: ModelConfig, width: int, emitted: float, states: StateConfig, ring_dtype: str | None
) -> float:
    """The bytes of one request and layer: the state's traffic, and the ring's."""
    sizes, size = config.part(GatedDeltaNetConfig), ITEMSIZES[states.dtype]
    state = sizes.values * sizes.key_dim * size
    if states.policy == "snapshot":
        return state * (1 + width)
    keys = sizes.key_heads * sizes.key_dim
    token = ITEMSIZES[ring_dtype or states.dtype] * (sizes.values + keys)
    token += 4 * sizes.value_heads  # the decay
    steps_fit = (states.window or default_window(size)) - width + 1
    folds = emitted / (steps_fit + (emitted - 1) / 2)  # a share of the steps
    return state * (1 + folds) + (steps_fit / 2 + width) * token


def step_seconds(
    moved: dict[str, float], config: ModelConfig, tokens: int, bytes_per_second: float
) -> float:
    """The floor of a step that moves `moved` and verifies `tokens` tokens in all rows together."""
    flops = 2 * forward_size(config) * tokens
    return max(sum(moved.values()) / bytes_per_second, flops / MATMUL_FLOPS)

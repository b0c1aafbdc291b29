"""The whole model in its training form: initial weights, trunk, and the MTP head at every depth.

Row i of a batch of token rows holds token i at position i. The trunk's row i predicts token i + 1.
The head's row i at depth d (its *chain* i) reads token i + d and predicts token i + d + 1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tools.embedded_model import layers
from tools.embedded_model.layers import ModelConfig, Params

MTP_ATTENTION = "mtp.layers.0.self_attn."


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by published tensor name; the head is tied, so there is no `lm_head.weight`."""
    hidden, inner, heads, dim = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.head_dim,
    )
    mixed = 2 * config.gdn_key_size + config.gdn_value_size
    attention = {
        "q_proj": (2 * heads * dim, hidden),
        "k_proj": (config.num_kv_heads * dim, hidden),
        "v_proj": (config.num_kv_heads * dim, hidden),
        "o_proj": (hidden, heads * dim),
        "q_norm": (dim,),
        "k_norm": (dim,),
    }
    linear_attention = {
        "in_proj_qkv": (mixed, hidden),
        "in_proj_z": (config.gdn_value_size, hidden),
        "in_proj_a": (config.gdn_value_heads, hidden),
        "in_proj_b": (config.gdn_value_heads, hidden),
        "conv1d": (mixed, 1, config.conv_width),
        "norm": (config.gdn_value_dim,),
        "out_proj": (hidden, config.gdn_value_size),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    shapes |= {
        f"mtp.{norm}.weight": (hidden,)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    for layer in [*range(config.num_layers), None]:
        prefix = "mtp.layers.0." if layer is None else f"model.layers.{layer}."
        if layer is None or config.is_full_attention(layer):
            shapes |= {
                f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()
            }
        else:
            shapes |= {
                f"{prefix}linear_attn.{name}.weight": shape
                for name, shape in linear_attention.items()
            }
            shapes |= {
                f"{prefix}linear_attn.{name}": (config.gdn_value_heads,)
                for name in ("A_log", "dt_bias")
            }
        shapes |= {f"{prefix}mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {
            f"{prefix}{name}.weight": (hidden,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    return shapes


def init_params(config: ModelConfig, seed: int) -> Params:
    """Initial fp32 weights.

    The decay gates begin as in flash-linear-attention: A ~ U(0, 16), dt ~ log U(1e-3, 1e-1).
    """
    rng = np.random.default_rng(seed)
    residual_scale = (2 * config.num_layers) ** -0.5

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("A_log"):
            return np.log(rng.uniform(1e-3, 16.0, shape))
        if name.endswith("dt_bias"):
            dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
            return dt + np.log(-np.expm1(-dt))  # the inverse of softplus
        if name.endswith("linear_attn.norm.weight"):
            return np.ones(shape)
        if len(shape) == 1:
            return np.zeros(shape)
        if name.endswith("conv1d.weight"):
            return rng.uniform(-0.5, 0.5, shape)
        if name.endswith("embed_tokens.weight"):
            return rng.normal(0, 0.02, shape)
        scale = (
            residual_scale
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            else 1.0
        )
        return rng.normal(0, scale * shape[-1] ** -0.5, shape)

    return {
        name: jnp.asarray(draw(name, shape), jnp.float32)
        for name, shape in weight_shapes(config).items()
    }


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """`x` with a share `rate` of its entries zeroed, the rest scaled up; without a key, `x`."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T hidden"]:
    return params["model.embed_tokens.weight"][tokens]


def logits(
    params: Params, hidden: Float[Array, "*rest hidden"], config: ModelConfig
) -> Float[Array, "*rest vocab"]:
    dtype = config.compute_dtype
    weight = params["model.embed_tokens.weight"].astype(dtype)
    return jnp.einsum(
        "...i,oi->...o", hidden.astype(dtype), weight, preferred_element_type=jnp.float32
    )


def positions_of(tokens: Int[Array, "B T"], first: int = 0) -> Int[Array, "B T"]:
    return jnp.broadcast_to(first + jnp.arange(tokens.shape[1]), tokens.shape)


def mlp_block(params: Params, prefix: str, x: Array, config: ModelConfig) -> Array:
    return layers.swiglu(
        params,
        prefix + "mlp.",
        layers.rms_norm(x, params[prefix + "post_attention_layernorm.weight"], config.eps),
        config,
    )


def trunk(
    params: Params,
    tokens: Int[Array, "B T"],
    config: ModelConfig,
    rate: float = 0.0,
    key: Array | None = None,
) -> Float[Array, "B T hidden"]:
    """The hidden states after the final norm, which both the logits and the head read."""
    keys = iter(
        jax.random.split(key, 1 + 2 * config.num_layers)
        if key is not None
        else [None] * (1 + 2 * config.num_layers)
    )
    x = dropout(embed(params, tokens), rate, next(keys))
    positions = positions_of(tokens)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        normed = layers.rms_norm(x, params[prefix + "input_layernorm.weight"], config.eps)
        if config.is_full_attention(layer):
            mixed = layers.attention(params, prefix + "self_attn.", normed, positions, config)
        else:
            mixed = layers.gated_delta_net(params, prefix + "linear_attn.", normed, config)
        x = x + dropout(mixed.astype(jnp.float32), rate, next(keys))
        x = x + dropout(mlp_block(params, prefix, x, config).astype(jnp.float32), rate, next(keys))
    return layers.rms_norm(x, params["model.norm.weight"], config.eps)


def mtp_input(
    params: Params,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T hidden"],
    config: ModelConfig,
) -> Array:
    """Joins each token's embedding (first) with the hidden state before it (second)."""
    embedding = layers.rms_norm(
        embed(params, tokens), params["mtp.pre_fc_norm_embedding.weight"], config.eps
    )
    hidden = layers.rms_norm(hidden, params["mtp.pre_fc_norm_hidden.weight"], config.eps)
    return layers.linear(
        jnp.concatenate([embedding, hidden], -1), params["mtp.fc.weight"], config
    ).astype(jnp.float32)


def chain_attention(
    queries: Array, first: tuple[Array, Array], chain: list[tuple[Array, Array]]
) -> Array:
    """Mixed values [B, T, H, D]: chain i attends to depth 1 of rows <= i, and to itself after.

    This is the head's KV cache at inference: rows of verified tokens were all written at depth 1,
    from the trunk's hidden states; only the chain's own drafts were written by the head itself.
    `first` and each entry of `chain` (depths 2..d) hold keys and values [B, T, H, D].
    """
    scores = [layers.causal_scores(queries, first[0])]
    scores += [
        jnp.einsum("bqhd,bqhd->bhq", queries, key, preferred_element_type=jnp.float32)[..., None]
        for key, _ in chain
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), -1).astype(queries.dtype)
    time = queries.shape[1]
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights[..., :time], first[1])
    for index, (_, value) in enumerate(chain):
        mixed += jnp.swapaxes(weights[..., time + index], 1, 2)[..., None] * value
    return mixed


def mtp_chain(params: Params, tokens, hidden: Float[Array, "B T hidden"], config: ModelConfig):
    """Yields the head's post-norm states [B, T, hidden] of depths 1, 2, ….

    `tokens` is an iterable of one [B, T] array per depth, chain i's input token in row i; it is
    read one depth at a time, so it may derive a depth's tokens from the states yielded before.
    """
    prefix, first, chain = "mtp.layers.0.", None, []
    for depth, depth_tokens in enumerate(tokens):
        x = mtp_input(params, depth_tokens, hidden, config)
        normed = layers.rms_norm(x, params[prefix + "input_layernorm.weight"], config.eps)
        positions = positions_of(depth_tokens, depth)
        query, gate, key, value = layers.attention_inputs(
            params, MTP_ATTENTION, normed, positions, config
        )
        if first is None:
            first = (key, value)
        else:
            chain = [*chain, (key, value)]
        mixed = chain_attention(query, first, chain)
        x = x + layers.attention_output(params, MTP_ATTENTION, mixed, gate, config).astype(
            jnp.float32
        )
        x = x + mlp_block(params, prefix, x, config).astype(jnp.float32)
        hidden = layers.rms_norm(x, params["mtp.norm.weight"], config.eps)
        yield hidden


def draft(
    params: Params,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T hidden"],
    num_drafts: int,
    config: ModelConfig,
) -> Int[Array, "B T K"]:
    """Return the head's greedy drafts: row i holds those of tokens i + 2, i + 3, …."""
    drafts = [jnp.roll(tokens, -1, 1)]
    for state in mtp_chain(params, (drafts[depth] for depth in range(num_drafts)), hidden, config):
        drafts.append(jnp.argmax(logits(params, state, config), -1).astype(tokens.dtype))
    return jnp.stack(drafts[1:], -1)


@functools.partial(jax.jit, static_argnames=("config",))
def trunk_logits(
    params: Params, tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T vocab"]:
    return logits(params, trunk(params, tokens, config), config)

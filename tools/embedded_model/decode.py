"""One token at a time from a cache: how the trunk writes text, for distillation and evaluation."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tools.embedded_model import layers, model
from tools.embedded_model.layers import ModelConfig, Params


def empty_cache(batch: int, length: int, config: ModelConfig) -> list[tuple[Array, Array]]:
    """One entry a layer.

    Attention: keys and values [B, length, H, D]. GDN: the last conv inputs [B, width - 1, channels]
    and the recurrent state [B, H, K, V].
    """
    mixed = 2 * config.gdn_key_size + config.gdn_value_size
    keys = jnp.zeros((batch, length, config.num_heads, config.head_dim), config.compute_dtype)
    window = jnp.zeros((batch, config.conv_width - 1, mixed), jnp.float32)
    state = jnp.zeros(
        (batch, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim), jnp.float32
    )
    return [
        (keys, keys) if config.is_full_attention(layer) else (window, state)
        for layer in range(config.num_layers)
    ]


def attend_one(params: Params, prefix: str, x: Array, position: Array, cache, config: ModelConfig):
    """Gated attention of one row [B, 1, hidden] over the cached rows up to `position`."""
    positions = jnp.broadcast_to(position, x.shape[:2])
    query, gate, key, value = layers.attention_inputs(params, prefix, x, positions, config)
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, new, position, 1)
        for old, new in zip(cache, (key, value), strict=True)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(config.compute_dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, values)
    return layers.attention_output(params, prefix, mixed, gate, config), (keys, values)


def recur_one(params: Params, prefix: str, x: Array, cache, config: ModelConfig):
    """The gated delta net of one row [B, 1, hidden]: decay, then the delta rule, then the read."""
    window, state = cache
    mixed = layers.linear(x, params[prefix + "in_proj_qkv.weight"], config).astype(jnp.float32)
    window = jnp.concatenate([window, mixed], 1)
    convolved = jax.nn.silu(
        jnp.einsum("btc,ct->bc", window, params[prefix + "conv1d.weight"][:, 0])
    )
    query, key, value = layers.gdn_heads(convolved, config)
    log_decay, beta = (gate[:, 0] for gate in layers.gdn_gates(params, prefix, x, config))
    state = state * jnp.exp(log_decay)[..., None, None]
    delta = beta[..., None] * (value - jnp.einsum("bhkv,bhk->bhv", state, key))
    state = state + key[..., None] * delta[..., None, :]
    output = jnp.einsum("bhkv,bhk->bhv", state, query)[:, None]
    return layers.gdn_output(params, prefix, output, x, config), (window[:, 1:], state)


def step(params: Params, tokens: Int[Array, " B"], position: Array, cache, config: ModelConfig):
    """The logits [B, vocab] after one more token, and the cache with it."""
    x = model.embed(params, tokens[:, None])
    new_cache = []
    for layer, entry in enumerate(cache):
        prefix = f"model.layers.{layer}."
        normed = layers.rms_norm(x, params[prefix + "input_layernorm.weight"], config.eps)
        if config.is_full_attention(layer):
            mixed, entry = attend_one(
                params, prefix + "self_attn.", normed, position, entry, config
            )
        else:
            mixed, entry = recur_one(params, prefix + "linear_attn.", normed, entry, config)
        x = x + mixed.astype(jnp.float32)
        x = x + model.mlp_block(params, prefix, x, config).astype(jnp.float32)
        new_cache.append(entry)
    hidden = layers.rms_norm(x, params["model.norm.weight"], config.eps)
    return model.logits(params, hidden[:, 0], config), new_cache


@functools.partial(jax.jit, static_argnames=("config",))
def write(
    params: Params,
    tokens: Int[Array, "B T"],
    is_given: Bool[Array, "B T"],
    temperature: Float[Array, " B"],
    key: Array,
    config: ModelConfig,
) -> Int[Array, "B T"]:
    """`tokens` with every entry that is not given replaced by the trunk's own choice.

    Column 0 must be given. Temperature 0 is greedy; otherwise argmax(logits / T + Gumbel noise).
    The key is consumed.
    """

    def advance(carry, inputs):
        token, cache, position = carry
        given_token, given, step_key = inputs
        logits, cache = step(params, token, position, cache, config)
        noise = jax.random.gumbel(step_key, logits.shape)
        choice = jnp.argmax(logits + temperature[:, None] * noise, -1).astype(tokens.dtype)
        token = jnp.where(given, given_token, choice)
        return (token, cache, position + 1), token

    batch, length = tokens.shape
    start = (tokens[:, 0], empty_cache(batch, length, config), jnp.int32(0))
    inputs = (tokens.T[1:], is_given.T[1:], jax.random.split(key, length - 1))
    _, written = jax.lax.scan(advance, start, inputs)
    return jnp.concatenate([tokens[:, :1], written.T], 1)

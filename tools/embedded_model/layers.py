"""The layers of Qwen3.5 in their training form: whole rows at once, no cache.

Weights keep their published layout, `[out, in]`; `params` maps published tensor names to arrays and
`prefix` picks the layer. Matrix products run in `config.compute_dtype`; norms, gates, softmax and
the recurrence run in fp32. Formulas: transformers' `modeling_qwen3_5.py`; the chunked form of the
gated delta rule: Yang et al., "Gated Delta Networks" (2024), section 3.3.

Axes: B batch, T positions, H query or value heads, D head width, K and V widths of GDN keys and
values, N chunks, C positions of a chunk.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model; the defaults are the bundled one's."""

    vocab_size: int = 2048
    hidden_size: int = 160
    intermediate_size: int = 416
    num_layers: int = 8
    full_attention_interval: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 10_000.0
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 64
    gdn_value_dim: int = 64
    conv_width: int = 4
    eps: float = 1e-6
    chunk: int = 64
    compute_dtype: jnp.dtype = jnp.dtype("bfloat16")

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def gdn_key_size(self) -> int:
        return self.gdn_key_heads * self.gdn_key_dim

    @property
    def gdn_value_size(self) -> int:
        return self.gdn_value_heads * self.gdn_value_dim


def linear(
    x: Float[Array, "*rest in"], weight: Float[Array, "out in"], config: ModelConfig
) -> Float[Array, "*rest out"]:
    dtype = config.compute_dtype
    return jnp.einsum("...i,oi->...o", x.astype(dtype), weight.astype(dtype))


def rms_norm(
    x: Float[Array, "*rest width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "*rest width"]:
    """The zero-centred norm (scale 1 + weight) of every place but the GDN output; fp32."""
    return scaled_rms(x, 1.0 + weight, eps)


def scaled_rms(
    x: Float[Array, "*rest width"], scale: Float[Array, " width"], eps: float
) -> Float[Array, "*rest width"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def l2_norm(x: Float[Array, "*rest width"]) -> Float[Array, "*rest width"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def rope(
    x: Float[Array, "B T H D"], positions: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T H D"]:
    """Rotates the first `rotary_dim` channels, pairs (i, i + rotary_dim / 2)."""
    half = config.rotary_dim // 2
    inverse = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = jnp.split(x, [half, 2 * half], -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention_inputs(params: Params, prefix: str, x: Array, positions: Array, config: ModelConfig):
    """Queries, their output gate, keys and values, the last two repeated; each [B, T, H, D]."""
    batch, time, _ = x.shape
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    query_gate = linear(x, params[prefix + "q_proj.weight"], config).reshape(
        batch, time, heads, 2 * dim
    )
    query, gate = jnp.split(query_gate, 2, -1)
    key = linear(x, params[prefix + "k_proj.weight"], config).reshape(batch, time, kv_heads, dim)
    value = linear(x, params[prefix + "v_proj.weight"], config).reshape(batch, time, kv_heads, dim)
    query = (
        rope(rms_norm(query, params[prefix + "q_norm.weight"], config.eps), positions, config)
        * dim**-0.5
    )
    key = rope(rms_norm(key, params[prefix + "k_norm.weight"], config.eps), positions, config)
    key, value = (
        jnp.repeat(kv.astype(config.compute_dtype), heads // kv_heads, 2) for kv in (key, value)
    )
    return query.astype(config.compute_dtype), gate, key, value


def attention_output(
    params: Params, prefix: str, mixed: Array, gate: Array, config: ModelConfig
) -> Array:
    """Gates the mixed values [B, T, H, D] head by head and projects them to [B, T, hidden]."""
    gated = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return linear(gated.reshape(*gated.shape[:2], -1), params[prefix + "o_proj.weight"], config)


def causal_scores(
    query: Float[Array, "B T H D"], key: Float[Array, "B T H D"]
) -> Float[Array, "B H T T"]:
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    time = scores.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -jnp.inf)


def attention(
    params: Params, prefix: str, x: Array, positions: Array, config: ModelConfig
) -> Array:
    """Causal gated attention, [B, T, hidden] -> [B, T, hidden]."""
    query, gate, key, value = attention_inputs(params, prefix, x, positions, config)
    weights = jax.nn.softmax(causal_scores(query, key), -1).astype(config.compute_dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return attention_output(params, prefix, mixed, gate, config)


def causal_conv(
    x: Float[Array, "B T channels"], weight: Float[Array, "channels 1 width"]
) -> Float[Array, "B T channels"]:
    """Depthwise convolution over the past, then SiLU; the last tap is the current position's."""
    width, time = weight.shape[-1], x.shape[1]
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (width - 1, 0), (0, 0)))
    return jax.nn.silu(sum(padded[:, tap : tap + time] * weight[:, 0, tap] for tap in range(width)))


def gdn_heads(mixed: Float[Array, "*rest channels"], config: ModelConfig):
    """Splits the convolved q|k|v: normed queries and keys [*, H, K], values [*, H, V]."""
    query, key, value = jnp.split(mixed, [config.gdn_key_size, 2 * config.gdn_key_size], -1)
    group = config.gdn_value_heads // config.gdn_key_heads
    query, key = (
        l2_norm(part.reshape(*part.shape[:-1], config.gdn_key_heads, -1)) for part in (query, key)
    )
    query, key = (jnp.repeat(part, group, -2) for part in (query * config.gdn_key_dim**-0.5, key))
    return query, key, value.reshape(*value.shape[:-1], config.gdn_value_heads, -1)


def gdn_gates(params: Params, prefix: str, x: Array, config: ModelConfig) -> tuple[Array, Array]:
    """The log decay (<= 0) and the write strength beta, both [*, H] fp32."""
    a = linear(x, params[prefix + "in_proj_a.weight"], config).astype(jnp.float32)
    b = linear(x, params[prefix + "in_proj_b.weight"], config).astype(jnp.float32)
    log_decay = -jnp.exp(params[prefix + "A_log"]) * jax.nn.softplus(a + params[prefix + "dt_bias"])
    return log_decay, jax.nn.sigmoid(b)


def gdn_output(
    params: Params, prefix: str, mixed: Float[Array, "*rest H V"], x: Array, config: ModelConfig
) -> Array:
    """Norm (plain weight), then SiLU gate, then projection to [*, hidden]."""
    gate = linear(x, params[prefix + "in_proj_z.weight"], config).astype(jnp.float32)
    normed = scaled_rms(mixed, params[prefix + "norm.weight"], config.eps)
    gated = normed.reshape(gate.shape) * jax.nn.silu(gate)
    return linear(gated, params[prefix + "out_proj.weight"], config)


def gated_delta_net(params: Params, prefix: str, x: Array, config: ModelConfig) -> Array:
    """[B, T, hidden] -> [B, T, hidden]; T is a multiple of `config.chunk`."""
    mixed = linear(x, params[prefix + "in_proj_qkv.weight"], config)
    query, key, value = gdn_heads(causal_conv(mixed, params[prefix + "conv1d.weight"]), config)
    log_decay, beta = gdn_gates(params, prefix, x, config)
    output = chunked_delta_rule(query, key, value, log_decay, beta, config.chunk)
    return gdn_output(params, prefix, output, x, config)


@jax.custom_vjp
def unit_lower_inverse(strict: Float[Array, "*rest C C"]) -> Float[Array, "*rest C C"]:
    """The inverse M of I + `strict`, `strict` being strictly lower triangular.

    Its own derivative, -M^T dM M^T below the diagonal, spares two more triangular solves.
    """
    identity = jnp.broadcast_to(jnp.eye(strict.shape[-1], dtype=strict.dtype), strict.shape)
    return jax.lax.linalg.triangular_solve(
        strict + identity, identity, left_side=True, lower=True, unit_diagonal=True
    )


def _inverse_forward(strict):
    inverse = unit_lower_inverse(strict)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    return (-jnp.tril(jnp.einsum("...ji,...jk,...lk->...il", inverse, cotangent, inverse), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def chunked_delta_rule(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    chunk: int,
) -> Float[Array, "B T H V"]:
    """The gated delta rule from a zero state, chunk by chunk.

    Per position: S <- e^g S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.
    """
    batch, time, heads, _ = query.shape
    chunks = time // chunk

    def split(x):  # [B, T, H, ...] -> [N, B, H, C, ...]
        x = x.reshape(batch, chunks, chunk, heads, *x.shape[3:])
        return x.transpose(1, 0, 3, 2, *range(4, x.ndim))

    query, key, value, log_decay, beta = map(split, (query, key, value, log_decay, beta))
    total = jnp.cumsum(log_decay, -1)  # [N, B, H, C]
    decay = jnp.exp(
        jnp.where(
            jnp.tril(jnp.ones((chunk, chunk), bool)),
            total[..., :, None] - total[..., None, :],
            -jnp.inf,
        )
    )
    overlap = jnp.einsum("nbhik,nbhjk->nbhij", key, key) * decay * beta[..., None]
    inverse = unit_lower_inverse(jnp.tril(overlap, -1))
    new_values = inverse @ (value * beta[..., None])
    from_state = inverse @ (key * (beta * jnp.exp(total))[..., None])
    within = jnp.einsum("nbhik,nbhjk->nbhij", query, key) * decay
    query = query * jnp.exp(total)[..., None]
    key = key * jnp.exp(total[..., -1:] - total)[..., None]
    last = jnp.exp(total[..., -1])[..., None, None]

    def step(state, inputs):  # state [B, H, K, V]
        query, key, new_values, from_state, within, last = inputs
        delta = new_values - from_state @ state
        output = query @ state + within @ delta
        return last * state + jnp.swapaxes(key, -1, -2) @ delta, output

    state = jnp.zeros((batch, heads, query.shape[-1], value.shape[-1]), jnp.float32)
    _, output = jax.lax.scan(
        step, state, (query, key, new_values, from_state, within, last), unroll=4
    )
    return output.transpose(1, 0, 3, 2, 4).reshape(batch, time, heads, -1)


def swiglu(params: Params, prefix: str, x: Array, config: ModelConfig) -> Array:
    gate = jax.nn.silu(linear(x, params[prefix + "gate_proj.weight"], config))
    return linear(
        gate * linear(x, params[prefix + "up_proj.weight"], config),
        params[prefix + "down_proj.weight"],
        config,
    )

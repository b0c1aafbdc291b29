"""Attention over the paged cache: Qwen3's, and Qwen3.5's with an output gate."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import Pools
from jaxspec.models.base import Asked, ModelInputs
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Linear, Placement, declare
from jaxspec.models.layers.rope import Rotation
from jaxspec.pallas.attention.inputs import attention_inputs
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged import paged_attention
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.norm.residual import Delta

_Projected = Float[Array, "tokens outputs"]


def attend(
    queries: Float[Array, "tokens heads head_dim"],
    kv: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    layer: int,
    inputs: ModelInputs,
    gate: OutputGate | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attention over pages that have this step's keys and values: each region's own operation.

    `gate`: of all tokens, what then multiplies their heads.
    """
    decode, prefill, split = inputs.decode, inputs.prefill, inputs.num_decode_tokens
    rectangle = queries[:split].reshape(decode.slots.shape[0], inputs.width, *queries.shape[1:])
    gates = (None, None) if gate is None else gate.split(split)
    out = paged_attention(
        rectangle,
        kv,
        layer,
        inputs.page_tables,
        decode.slots,
        decode.num_computed,
        decode.query_len,
        gates[0],
    ).reshape(split, *queries.shape[1:])
    if prefill is not None:
        chunks = prefill_attention(
            queries[split:],
            kv,
            layer,
            inputs.page_tables,
            prefill.slots,
            prefill.num_computed,
            prefill.query_start,
        )
        out = jnp.concatenate([out, chunks if gates[1] is None else gates[1](chunks)])
    return out


class Attention(nnx.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions (Qwen3)."""

    gated = False  # whether each query head is followed by a gate
    zero_centred = False  # the norms of queries and keys

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights."""
        self.config = config
        width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        outputs = {"q_proj": (1 + self.gated) * width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = Linear(config.hidden_size, outputs, dtype)
        init = jax.nn.initializers.zeros if self.zero_centred else jax.nn.initializers.ones
        # The queries' and the keys', in one matrix, which the kernel gets without a copy.
        self.norms = declare((2, config.head_dim), dtype, init)
        self.out = Linear(width, {"o_proj": config.hidden_size}, dtype)

    @property
    def projection(self) -> Linear:
        """What the normed residual stream is multiplied with first, all side by side."""
        return self.qkv

    def __call__(
        self, projected: _Projected, inputs: ModelInputs, angles: Rotation, pools: Pools,
        layer: int, asked: Asked | None = None,
    ) -> tuple[Delta, Pools]:  # fmt: skip
        """What is to be added to the residual stream, given what `projection` makes of it.

        `layer` is the index among the pool's layers. `asked`: of which tokens; of all
        others keys and values are written, and no more.
        """
        config = self.config
        queries, kv = attention_inputs(
            projected,
            self.norms[...],
            angles,
            pools["kv"],
            layer,
            inputs.kv_slots,
            heads=config.num_heads,
            gated=self.gated,
            eps=config.rms_norm_eps,
            zero_centred=self.zero_centred,
        )
        if asked is not None:
            queries, projected, inputs = queries[asked.index], projected[asked.index], asked.inputs
        gate = OutputGate(projected) if self.gated else None
        attended = attend(queries, kv, layer, inputs, gate)
        delta = self.out.delta(attended.reshape(projected.shape[0], -1))
        return delta, pools | {"kv": kv}

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors, under `self_attn.`."""
        prefix += "self_attn."
        yield from self.qkv.checkpoint(prefix)
        for row, name in enumerate(("q_norm.weight", "k_norm.weight")):
            yield Placement(prefix + name, self.norms.shape[1:], self.norms, index=row)
        yield from self.out.checkpoint(prefix)


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate (Qwen3.5).

    `q_proj` gives, head by head, `head_dim` channels of query and then as many of gate. The norms
    of queries and keys are zero-centred, and only the first `rotary_dim` channels are rotated.
    """

    gated = True
    zero_centred = True

"""Causal depthwise convolution over a ring of inputs that persists between steps."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.recurrent.conv_ring import (
    CHANNELS_PER_THREAD,
    Activation,
    ConvPool,
    past_rows,
    ring_place,
)
from jaxspec.regions import DecodeRegion, PrefillRegion, owner_of

Taps = Float[Array, "kernel channels"]
Bias = Float[Array, " channels"] | None


def conv_update(
    x: Float[Array, "rows width channels"],
    weight: Taps,
    conv: ConvPool,
    layer: int,
    rows: DecodeRegion,
    *,
    bias: Bias = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "rows width channels"], ConvPool]:
    """Convolve each row's tokens causally; return outputs in the dtype of `x`, and the new pool.

    Mamba2 adds a `bias` before the activation, SiLU; LFM2's convolution has no activation.

    A slot keeps its last inputs in a ring: the input at position `p` is in row `p % window`. A
    row's tokens start at position `num_computed`, and the `kernel - 1` inputs before them are read
    from the ring. To roll back, the caller counts fewer tokens: rejected inputs are then past the
    position, where no step reads them, and later inputs overwrite them. `weight[-1]` multiplies the
    current token; products and sums are float32.

    Rows that are not live leave the pool unchanged, and the inputs of tokens `t >= query_len` are
    never stored.

    Raises:
        ValueError: `window < kernel - 1 + width`: a step might write a row that it reads.
    """
    check_window(x, weight, conv)
    why = why_not_convolve(x, weight, conv)
    if conv.shape[3] % (device.THREADS * CHANNELS_PER_THREAD):
        why = f"{conv.shape[3]} channels"
    if dispatch.runs_kernel("conv_update", why, rows=x.shape[0]):
        from jaxspec.pallas.recurrent.conv_update_kernel import conv_update_kernel

        on_device = dispatch.layer_index(conv, layer)
        return conv_update_kernel(x, weight, conv, on_device, rows, bias, activation=activation)
    return conv_update_reference(x, weight, conv, layer, rows, bias=bias, activation=activation)


def check_window(x: Float[Array, "rows width columns"], weight: Taps, conv: ConvPool) -> None:
    width, needed = x.shape[1], weight.shape[0] - 1 + x.shape[1]
    if conv.shape[2] < needed:
        raise ValueError(
            f"A convolution window must hold kernel - 1 + width = {needed} inputs, "
            f"but the pool's holds {conv.shape[2]}. Allocate the pool with num_drafts >= "
            f"{width - 1}."
        )


def conv_update_reference(
    x, weight, conv, layer, rows, *, bias=None, activation: Activation = "silu"
):
    """Reference for `conv_update`. With kernel 4 and 3 drafts, of which 1 is accepted:

    row           0   1   2   3   4   5   6
    before        b   c   .   .   .   .   a   9 computed: a b c are read
    after         b   c   t9  d10 d11 d12 a
    next         d14  c   t9  d10 t11 d12 d13  11 computed: c t9 d10 were read
    """
    width, history = x.shape[1], weight.shape[0] - 1
    _, num_slots, window, _ = conv.shape
    slot = jnp.clip(rows.slots, 0, num_slots - 1)
    past = conv[layer, slot[:, None], past_rows(rows.num_computed, history, window)]

    # Write back the inputs that were read: this orders the two accesses; otherwise XLA copies the
    # pool.
    token = jnp.arange(-history, width, dtype=jnp.int32)[None, :]
    ring_row = (ring_place(rows.num_computed, window)[:, None] + token) % window
    is_stored = rows.is_live(num_slots)[:, None] & (token < rows.query_len[:, None])
    target = jnp.where(is_stored, rows.slots[:, None], num_slots)
    stored = jnp.concatenate([past, x.astype(conv.dtype)], axis=1)
    conv = conv.at[layer, target, ring_row].set(stored, mode="drop")

    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = sum(
        inputs[:, tap : tap + width].astype(jnp.float32) * taps[None, None, tap]
        for tap in range(history + 1)
    )
    return activated(y, bias, activation).astype(x.dtype), conv


def activated(y: Any, bias: Bias, activation: Activation) -> Any:
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return jax.nn.silu(y) if activation == "silu" else y


def why_not_convolve(
    x: Float[Array, "rows width columns"], weight: Taps, conv: ConvPool
) -> str | None:
    """Return why no convolving kernel supports these operands, or None.

    `x` may be a projection, with more columns than the channels.
    """
    if x.shape[1] > 9:
        return f"{x.shape[1]} tokens a row, more than 9"
    if not 2 <= weight.shape[0] <= 8:
        return f"a kernel of {weight.shape[0]}, not 2 to 8"
    if x.dtype != conv.dtype or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{x.dtype} tokens on a ring in {conv.dtype}"
    return None


def conv_prefill(
    x: Float[Array, "tokens channels"],
    weight: Taps,
    conv: ConvPool,
    layer: int,
    chunks: PrefillRegion,
    *,
    bias: Bias = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "tokens channels"], ConvPool]:
    """`conv_update` for flat prompt chunks; runs in XLA on every device.

    A chunk that starts its prompt (`num_computed` 0) is preceded by zeros, any other chunk by the
    inputs in the ring. The `kernel - 1` inputs that the next token will read are stored, with zeros
    for those before the prompt. Chunks that are not live leave the pool unchanged; tokens from
    `query_start[-1]` on are padding, with output 0.
    """
    num_tokens, history = x.shape[0], weight.shape[0] - 1
    _, num_slots, window, _ = conv.shape
    start, seqs = chunks.query_start, chunks.slots.shape[0]
    ago = jnp.arange(history, dtype=jnp.int32)

    slot = jnp.clip(chunks.slots, 0, num_slots - 1)
    past_row = past_rows(chunks.num_computed, history, window)
    past = conv[layer, slot[:, None], past_row].astype(x.dtype)
    past = jnp.where((chunks.num_computed > 0)[:, None, None], past, jnp.zeros((), x.dtype))

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = owner_of(token, start[1:])
    offset = token - start[owner]
    is_real = (token >= start[0]) & (token < start[-1])

    def input_at(owner, offset):
        """Return the input at `offset` in chunk `owner`; negative offsets are before the chunk."""
        new = x[jnp.clip(start[owner] + offset, 0, num_tokens - 1)]
        old = past[owner, jnp.clip(history + offset, 0, history - 1)]
        return jnp.where((offset >= 0)[..., None], new, old)

    taps = weight.astype(jnp.float32)
    y = sum(
        input_at(owner, offset - history + tap).astype(jnp.float32) * taps[None, tap]
        for tap in range(history + 1)
    )
    y = jnp.where(is_real[:, None], activated(y, bias, activation), 0.0).astype(x.dtype)

    length = chunks.query_len
    every = jnp.broadcast_to(jnp.arange(seqs, dtype=jnp.int32)[:, None], (seqs, history))
    stored = input_at(every, length[:, None] - history + ago[None, :])
    target = jnp.where(chunks.is_live(num_slots), chunks.slots, num_slots)
    ring_row = past_rows(ring_place(chunks.num_computed, window) + length, history, window)
    conv = conv.at[layer, target[:, None], ring_row].set(stored.astype(conv.dtype), mode="drop")
    return y, conv

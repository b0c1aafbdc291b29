"""Causal depthwise convolution over a ring of inputs that survives between steps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.recurrent.conv_ring import _VECTOR, past_rows, ring_place

_Conv = Float[Array, "layers slots window channels"]


def conv_update(
    x: Float[Array, "rows width channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
) -> tuple[Float[Array, "rows width channels"], _Conv]:
    """SiLU of the causal convolution of each row's tokens, in the dtype of `x`, and the new pool.

    A slot keeps its last inputs in a ring: that of the token at position `p` lies in row
    `p % window`. A row's tokens stand at `num_computed` and after it, and the `kernel - 1` inputs
    that precede them are read. Rolling back is counting less: what was rejected lies where nobody
    reads, and is overwritten by whatever comes to stand there. `weight[:, -1]` multiplies the
    current token; products and sums are float32. Needs `window >= kernel - 1 + width` (ValueError),
    so that no step writes what it reads. Rows with `query_len` 0 or slot 0 leave the pool
    untouched, and inputs of tokens beyond `query_len` are never stored.

    The kernel reads one tap of many channels at once, so it is handed `weight.T`: a caller that
    keeps `[kernel, channels]` and passes its `.T` spares XLA a transposition, 0.5 us of 6.
    """
    check_window(x, weight, conv)
    why = unsupported(x, weight, conv)
    if conv.shape[3] % (device.THREADS * _VECTOR):
        why = f"{conv.shape[3]} channels"
    if dispatch.runs_kernel("conv_update", why):
        from jaxspec.pallas.recurrent.conv_update_kernel import conv_update_kernel

        on_device = dispatch.layer_index(conv, layer)
        return conv_update_kernel(x, weight.T, conv, on_device, slots, num_computed, query_len)
    return conv_update_reference(x, weight, conv, layer, slots, num_computed, query_len)


def check_window(x, weight, conv):
    """Raise the ValueError of `conv_update`."""
    width, needed = x.shape[1], weight.shape[1] - 1 + x.shape[1]
    if conv.shape[2] < needed:
        raise ValueError(
            f"A convolution window must hold kernel - 1 + width = {needed} inputs, "
            f"but the pool's holds {conv.shape[2]}. Build the cache with num_drafts >= {width - 1}."
        )


def conv_update_reference(x, weight, conv, layer, slots, num_computed, query_len):
    """The specification of `conv_update`. With kernel 4 and 3 drafts, of which 1 is accepted:

    row           0   1   2   3   4   5   6
    before        b   c   .   .   .   .   a   9 computed: a b c are read
    after         b   c   t9  d10 d11 d12 a
    next         d14  c   t9  d10 t11 d12 d13  11 computed: c t9 d10 were read
    """
    rows, width, _ = x.shape
    history = weight.shape[1] - 1
    _, num_slots, window, _ = conv.shape
    slot, place = jnp.clip(slots, 0, num_slots - 1), past_rows(num_computed, history, window)
    past = conv[layer, slot[:, None], place]

    # What was read is written again: without an order between the two XLA copies the pool.
    token = jnp.arange(-history, width, dtype=jnp.int32)[None, :]
    place = (ring_place(num_computed, window)[:, None] + token) % window
    real = ((slots > 0) & (query_len > 0))[:, None] & (token < query_len[:, None])
    target = jnp.where(real, slots[:, None], num_slots)
    kept = jnp.concatenate([past, x.astype(conv.dtype)], axis=1)
    conv = conv.at[layer, target, place].set(kept, mode="drop")

    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = sum(
        inputs[:, tap : tap + width].astype(jnp.float32) * taps[None, None, :, tap]
        for tap in range(history + 1)
    )
    return jax.nn.silu(y).astype(x.dtype), conv


def unsupported(x, weight, conv):
    """Why no kernel takes these operands, or None; `x` may have more than channels."""
    if x.shape[1] > 9:
        return f"{x.shape[1]} tokens a row, more than 9"
    if not 2 <= weight.shape[1] <= 8:
        return f"a kernel of {weight.shape[1]}, not 2 to 8"
    if x.dtype != conv.dtype or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{x.dtype} tokens on a ring in {conv.dtype}"
    return None


def conv_prefill(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " seqs"],
    num_computed: Int[Array, " seqs"],
    query_start: Int[Array, " seqs+1"],
) -> tuple[Float[Array, "tokens channels"], _Conv]:
    """`conv_update` for chunks of prompts laid flat, `query_start[s]:query_start[s + 1]` each.

    A chunk that begins its prompt (`num_computed` 0) is preceded by zeros, any other by what the
    ring holds. Stored are the `kernel - 1` inputs that the next token will read, zeros for those
    before the prompt. Empty sequences and slot 0 leave the pool untouched; tokens after
    `query_start[-1]` are padding and come out as 0.
    """
    return conv_prefill_reference(x, weight, conv, layer, slots, num_computed, query_start)


def conv_prefill_reference(x, weight, conv, layer, slots, num_computed, query_start):
    """The specification of `conv_prefill`, in plain JAX."""
    num_tokens, history = x.shape[0], weight.shape[1] - 1
    _, num_slots, window, _ = conv.shape
    seqs = slots.shape[0]
    ago = jnp.arange(history, dtype=jnp.int32)

    past = conv[
        layer, jnp.clip(slots, 0, num_slots - 1)[:, None], past_rows(num_computed, history, window)
    ].astype(x.dtype)
    past = jnp.where((num_computed > 0)[:, None, None], past, jnp.zeros((), x.dtype))

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.clip(owner, 0, seqs - 1)
    offset = token - query_start[owner]
    real = (token >= query_start[0]) & (token < query_start[-1])

    def input_at(owner, offset):
        """The input of sequence `owner` at `offset` in its chunk; before 0 lies its past."""
        new = x[jnp.clip(query_start[owner] + offset, 0, num_tokens - 1)]
        old = past[owner, jnp.clip(history + offset, 0, history - 1)]
        return jnp.where((offset >= 0)[..., None], new, old)

    taps = weight.astype(jnp.float32)
    y = sum(
        input_at(owner, offset - history + tap).astype(jnp.float32) * taps[None, :, tap]
        for tap in range(history + 1)
    )
    y = jnp.where(real[:, None], jax.nn.silu(y), 0.0).astype(x.dtype)

    length = query_start[1:] - query_start[:-1]
    every = jnp.broadcast_to(jnp.arange(seqs, dtype=jnp.int32)[:, None], (seqs, history))
    kept = input_at(every, length[:, None] - history + ago[None, :])
    target = jnp.where((slots > 0) & (length > 0), slots, num_slots)
    place = past_rows(ring_place(num_computed, window) + length, history, window)
    return y, conv.at[layer, target[:, None], place].set(kept.astype(conv.dtype), mode="drop")

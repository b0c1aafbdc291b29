"""Causal depthwise convolution over a window that survives between steps, with rollback."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_Conv = Float[Array, "layers slots window channels"]


def conv_update(
    x: Float[Array, "rows width channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
) -> tuple[Float[Array, "rows width channels"], _Conv]:
    """SiLU of the causal convolution of each row's tokens, in the dtype of `x`, and the new pool.

    A slot keeps its last inputs. The `kernel - 1` that precede this step's tokens begin at
    `state_offset`; those from the second on are kept in front of this step's inputs, so that with
    `a` drafts accepted now the next step's window begins at `a`: rolling back is choosing an
    offset. `weight[:, -1]` multiplies the current token; products and sums are float32. Needs
    `window >= kernel - 2 + width` (ValueError). Rows with `query_len` 0 or slot 0 leave the pool
    untouched, and inputs of tokens beyond `query_len` are never stored.
    """
    return conv_update_reference(x, weight, conv, layer, slots, state_offset, query_len)


def conv_update_reference(x, weight, conv, layer, slots, state_offset, query_len):
    """The specification of `conv_update`. With kernel 4 and 3 drafts, of which 1 is accepted:

    before   a b c . . .      offset 0: the window is a b c
    tokens   t0 d1 d2 d3
    after    b c t0 d1 d2 d3  offset 1: the next window is c t0 d1
    """
    rows, width, _ = x.shape
    history = weight.shape[1] - 1
    _, num_slots, window, _ = conv.shape
    if window < history - 1 + width:
        raise ValueError(
            f"A convolution window must hold kernel - 2 + width = {history - 1 + width} inputs, "
            f"but the pool's holds {window}. Build the cache with num_drafts >= {width - 1}."
        )
    start = jnp.clip(state_offset, 0, window - history)
    place = start[:, None] + jnp.arange(history, dtype=jnp.int32)[None, :]
    past = conv[layer, jnp.clip(slots, 0, num_slots - 1)[:, None], place]
    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)

    taps = weight.astype(jnp.float32)
    y = sum(
        inputs[:, tap : tap + width].astype(jnp.float32) * taps[None, None, :, tap]
        for tap in range(history + 1)
    )

    real = jnp.arange(width, dtype=jnp.int32)[None, :] < query_len[:, None]
    kept = jnp.concatenate([past[:, 1:], _stored(x, real, conv.dtype)], axis=1)
    live = (slots > 0) & (query_len > 0)
    target = jnp.where(live, slots, num_slots)
    conv = conv.at[layer, target, : history - 1 + width].set(kept, mode="drop")
    return jax.nn.silu(y).astype(x.dtype), conv


def _stored(x, real, dtype):
    return jnp.where(real[..., None], x, jnp.zeros((), x.dtype)).astype(dtype)


def conv_prefill(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " seqs"],
    state_offset: Int[Array, " seqs"],
    num_computed: Int[Array, " seqs"],
    query_start: Int[Array, " seqs+1"],
) -> tuple[Float[Array, "tokens channels"], _Conv]:
    """`conv_update` for chunks of prompts laid flat, `query_start[s]:query_start[s + 1]` each.

    A chunk that begins its prompt (`num_computed` 0) is preceded by zeros, any other by the window
    at `state_offset`. The last `kernel - 1` inputs are stored at offset 0; a chunk shorter than
    that shifts the old ones. Empty sequences and slot 0 leave the pool untouched; tokens after
    `query_start[-1]` are padding and come out as 0.
    """
    return conv_prefill_reference(
        x, weight, conv, layer, slots, state_offset, num_computed, query_start
    )


def conv_prefill_reference(x, weight, conv, layer, slots, state_offset, num_computed, query_start):
    """The specification of `conv_prefill`, in plain JAX."""
    num_tokens, history = x.shape[0], weight.shape[1] - 1
    _, num_slots, window, _ = conv.shape
    seqs = slots.shape[0]
    ago = jnp.arange(history, dtype=jnp.int32)

    start = jnp.clip(state_offset, 0, window - history)
    past = conv[
        layer, jnp.clip(slots, 0, num_slots - 1)[:, None], start[:, None] + ago[None, :]
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
    return y, conv.at[layer, target, :history].set(kept.astype(conv.dtype), mode="drop")

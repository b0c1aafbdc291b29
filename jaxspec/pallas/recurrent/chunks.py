"""Chunk walk of recurrent prefills in XLA; `chunk_blocks` has that of the Mosaic kernels.

Tokens are flat: a pytree of arrays `[tokens, ...]`. Sequence `s` is
`query_start[s]:query_start[s + 1]`, and is computed in chunks of `CHUNK` tokens. The pool is
`[layers, slots, candidates, heads, values, keys]`; outputs are `[tokens, heads, values]`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.state_select import state_select, why_not_states
from jaxspec.regions import PrefillRegion

CHUNK = 64  # tokens per chunk; a chunk never spans two sequences

_States = Float[Array, "layers slots candidates heads values keys"]
_Outputs = Float[Array, "tokens heads values"]


def chunk_by_chunk(
    step: Callable, tokens: Any, states: _States, layer: int, chunks: PrefillRegion
) -> tuple[_Outputs, _States]:
    """Run `step` over the chunks of every sequence; return the outputs and the new pool.

    `step(state, chunk)` returns the state after a chunk, and its outputs. `chunk` has the structure
    of `tokens`, with `CHUNK` tokens of one sequence; those after the sequence's end are zeros.
    """
    num_slots, seqs = states.shape[1], chunks.slots.shape[0]
    num_tokens = jax.tree.leaves(tokens)[0].shape[0]
    if not seqs:
        return _without_chunks(num_tokens, states)
    length = jnp.where(chunks.is_live(num_slots), chunks.query_len, 0)
    chunks_end = jnp.cumsum((length + CHUNK - 1) // CHUNK, dtype=jnp.int32)
    initial = _initial_states(states, layer, chunks)

    def padded(x):  # the last chunk may extend past the tokens
        return jnp.pad(x, ((0, CHUNK),) + ((0, 0),) * (x.ndim - 1))

    tokens = jax.tree.map(padded, tokens)

    def take_chunk(chunk, carry):
        state, out, final = carry
        seq = jnp.searchsorted(chunks_end, chunk, side="right").astype(jnp.int32)
        seq = jnp.minimum(seq, seqs - 1)
        first = jnp.where(seq > 0, chunks_end[jnp.maximum(seq - 1, 0)], 0)
        offset = (chunk - first) * CHUNK
        start = chunks.query_start[seq] + offset
        real = jnp.arange(CHUNK, dtype=jnp.int32) < length[seq] - offset

        def taken(x):
            x = jax.lax.dynamic_slice_in_dim(x, start, CHUNK)
            return jnp.where(real.reshape((CHUNK,) + (1,) * (x.ndim - 1)), x, 0)

        state = jnp.where(offset == 0, initial[seq], state)
        state, new = step(state, jax.tree.map(taken, tokens))
        old = jax.lax.dynamic_slice_in_dim(out, start, CHUNK)
        new = jnp.where(real[:, None, None], new, old)
        out = jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return state, out, final.at[seq].set(state)

    out = jnp.zeros((num_tokens + CHUNK, *initial.shape[1:3]), jnp.float32)
    carry = (jnp.zeros_like(initial[0]), out, initial)
    most = (num_tokens + (CHUNK - 1) * seqs) // CHUNK
    _, out, final = dispatch.loop(chunks_end[-1], most, take_chunk, carry)
    target = jnp.where(length > 0, chunks.slots, num_slots)
    states = states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")
    return out[:num_tokens], states


def token_by_token(
    step: Callable, tokens: Any, states: _States, layer: int, chunks: PrefillRegion
) -> tuple[_Outputs, _States]:
    """Reference for `chunk_by_chunk`, with `step(state, token)` for one token."""
    num_slots, seqs = states.shape[1], chunks.slots.shape[0]
    num_tokens, start = jax.tree.leaves(tokens)[0].shape[0], chunks.query_start
    if not seqs:
        return _without_chunks(num_tokens, states)
    live = chunks.is_live(num_slots)
    initial = _initial_states(states, layer, chunks)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.clip(owner, 0, seqs - 1)
    real = (token >= start[0]) & (token < start[-1]) & live[owner]

    def take_token(current, scanned):
        seq, is_real, token = scanned
        state, out = step(current[seq], token)
        current = current.at[seq].set(jnp.where(is_real, state, current[seq]))
        return current, jnp.where(is_real, out, 0.0)

    final, out = jax.lax.scan(take_token, initial, (owner, real, tokens))
    target = jnp.where(live, chunks.slots, num_slots)
    return out, states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")


def why_not_chunk_blocks(x: Float[Array, "tokens heads values"], states: _States) -> str | None:
    """Return why the kernels' walk (`chunk_blocks`) does not support these operands, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokens in {x.dtype}, not 16 bits"
    why = why_not_states(states)
    return why or (f"{x.shape[0]} tokens, no multiple of 8" if x.shape[0] % 8 else None)


def _without_chunks(num_tokens, states):
    """Return the outputs and the pool where every token is padding."""
    return jnp.zeros((num_tokens, *states.shape[3:5]), jnp.float32), states


def _initial_states(states, layer, chunks):
    initial = state_select(states, layer, chunks)
    fresh = (chunks.num_computed <= 0)[:, None, None, None]
    return jnp.where(fresh, 0.0, initial.astype(jnp.float32))


def product(equation: str, *operands: Array) -> Array:
    """`einsum` in full float32; a GPU would use TF32 by default."""
    return jnp.einsum(equation, *operands, precision="highest")

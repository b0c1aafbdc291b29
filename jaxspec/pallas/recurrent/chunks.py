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
from jaxspec.regions import PrefillRegion, owner_of

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
    if not seqs:
        return _without_chunks(jax.tree.leaves(tokens)[0].shape[0], states)
    length = jnp.where(chunks.is_live(num_slots), chunks.query_len, 0)
    initial = _initial_states(states, layer, chunks)
    walk = _one_by_one if dispatch.longest() is None else _side_by_side
    out, final = walk(step, tokens, initial, chunks.query_start, length)
    target = jnp.where(length > 0, chunks.slots, num_slots)
    return out, states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")


def _one_by_one(step, tokens, initial, query_start, length):
    """Run one chunk after the other; no chunk is computed for padding."""
    chunks_end = jnp.cumsum((length + CHUNK - 1) // CHUNK, dtype=jnp.int32)

    def padded(x):  # the last chunk may extend past the tokens
        return jnp.pad(x, ((0, CHUNK),) + ((0, 0),) * (x.ndim - 1))

    num_tokens = jax.tree.leaves(tokens)[0].shape[0]
    tokens = jax.tree.map(padded, tokens)

    def take_chunk(chunk, carry):
        state, out, final = carry
        seq = owner_of(chunk, chunks_end)
        first = jnp.where(seq > 0, chunks_end[jnp.maximum(seq - 1, 0)], 0)
        offset = (chunk - first) * CHUNK
        start = query_start[seq] + offset
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
    _, out, final = jax.lax.fori_loop(0, chunks_end[-1], take_chunk, carry)
    return out[:num_tokens], final


def _side_by_side(step, tokens, initial, query_start, length):
    """Run the chunks of all sequences at the same offset at once, for gradients.

    The backward pass stores the states between chunks and computes all else again.
    """
    longest, seqs = dispatch.longest() or 1, len(length)
    size = min(CHUNK, 2 ** (longest - 1).bit_length())
    count = -(-longest // size)
    offset = jnp.arange(count * size, dtype=jnp.int32)
    place = query_start[:-1, None] + offset[None]
    real = offset[None] < length[:, None]

    def taken(x):  # [chunks, sequences, size, ...]
        x = jnp.where(
            real.reshape(*real.shape, *(1,) * (x.ndim - 1)), x[jnp.where(real, place, 0)], 0
        )
        return x.reshape(seqs, count, size, *x.shape[2:]).swapaxes(0, 1)

    at_once = jax.checkpoint(jax.vmap(step))
    final, out = jax.lax.scan(at_once, initial, jax.tree.map(taken, tokens))
    out = out.swapaxes(0, 1).reshape(seqs, count * size, *out.shape[3:])
    token = jnp.arange(jax.tree.leaves(tokens)[0].shape[0], dtype=jnp.int32)
    owner = owner_of(token, query_start[1:])
    offset = token - query_start[owner]
    real = (offset >= 0) & (offset < length[owner])
    out = out[owner, jnp.where(real, offset, 0)]
    return jnp.where(real[:, None, None], out, 0.0), final


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
    owner = owner_of(token, start[1:])
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


@jax.custom_jvp
def unit_lower_inverse(strictly_lower: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
    """Return `(1 + A)^-1` for a power of two `n`, by joining the inverses of ever larger blocks.

    Powers of `A` would grow where keys resemble each other.
    """
    half = strictly_lower.shape[-1] // 2
    if not half:
        return 1 - strictly_lower  # it is zero
    blocks = [strictly_lower[..., :half, :half], strictly_lower[..., half:, half:]]
    blocks = unit_lower_inverse(jnp.stack(blocks))
    joining = product("...ij,...jk->...ik", strictly_lower[..., half:, :half], blocks[0])
    joining = -product("...ij,...jk->...ik", blocks[1], joining)
    upper = jnp.concatenate([blocks[0], jnp.zeros_like(joining)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([joining, blocks[1]], axis=-1)], axis=-2)


@unit_lower_inverse.defjvp
def _inverse_derivative(primals, tangents):
    (strictly_lower,), (change,) = primals, tangents
    inverse = unit_lower_inverse(strictly_lower)
    return inverse, -product("...ij,...jk,...kl->...il", inverse, jnp.tril(change, -1), inverse)

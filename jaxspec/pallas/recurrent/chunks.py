"""What the prefills of recurrent layers share where XLA runs them: the way through the prompts.

Tokens are flat, sequence `s` is `query_start[s]:query_start[s + 1]`, and the pool is `[layers,
slots, candidates, heads, *state]` with states whose first dimension is an output's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.pallas.recurrent.state_select import state_select

CHUNK = 64  # tokens taken at once; a chunk never spans two sequences


def chunk_by_chunk(
    step: Callable, tokens, states, layer, slots, state_offset, num_computed, query_start
):
    """Outputs and the new pool, from `step(state, *chunk)`: the state after it, and its outputs.

    A chunk has `CHUNK` tokens of one sequence, with zeros for tokens in excess.
    """
    num_tokens, seqs = tokens[0].shape[0], slots.shape[0]
    num_slots = states.shape[1]
    length = jnp.where((slots > 0) & (slots < num_slots), query_start[1:] - query_start[:-1], 0)
    chunks_end = jnp.cumsum((length + CHUNK - 1) // CHUNK, dtype=jnp.int32)
    initial = _initial_states(states, layer, slots, state_offset, num_computed)
    # The last chunk may reach beyond the tokens.
    padded = [jnp.pad(x, ((0, CHUNK),) + ((0, 0),) * (x.ndim - 1)) for x in tokens]

    def take_chunk(chunk, carry):
        state, out, final = carry
        seq = jnp.searchsorted(chunks_end, chunk, side="right").astype(jnp.int32)
        seq = jnp.minimum(seq, seqs - 1)
        first = jnp.where(seq > 0, chunks_end[jnp.maximum(seq - 1, 0)], 0)
        begin = (chunk - first) * CHUNK
        start = query_start[seq] + begin
        real = jnp.arange(CHUNK, dtype=jnp.int32) < length[seq] - begin

        def taken(x):
            x = jax.lax.dynamic_slice_in_dim(x, start, CHUNK)
            return jnp.where(real.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)

        state = jnp.where(begin == 0, initial[seq], state)
        state, new = step(state, *map(taken, padded))
        old = jax.lax.dynamic_slice_in_dim(out, start, CHUNK)
        new = jnp.where(real[:, None, None], new, old)
        out = jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return state, out, final.at[seq].set(state)

    out = jnp.zeros((num_tokens + CHUNK, *initial.shape[1:3]), jnp.float32)
    carry = (jnp.zeros_like(initial[0]), out, initial)
    _, out, final = jax.lax.fori_loop(0, chunks_end[-1], take_chunk, carry)
    target = jnp.where(length > 0, slots, num_slots)
    states = states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")
    return out[:num_tokens], states


def token_by_token(
    step: Callable, tokens, states, layer, slots, state_offset, num_computed, query_start
):
    """The specification of `chunk_by_chunk`, with `step` for one token."""
    num_tokens, seqs = tokens[0].shape[0], slots.shape[0]
    num_slots = states.shape[1]
    length = query_start[1:] - query_start[:-1]
    live = (slots > 0) & (slots < num_slots) & (length > 0)
    initial = _initial_states(states, layer, slots, state_offset, num_computed)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.clip(owner, 0, seqs - 1)
    real = (token >= query_start[0]) & (token < query_start[-1]) & live[owner]

    def take_token(current, at):
        seq, is_real, *new = at
        state, out = step(current[seq], *new)
        current = current.at[seq].set(jnp.where(is_real, state, current[seq]))
        return current, jnp.where(is_real, out, 0.0)

    final, out = jax.lax.scan(take_token, initial, (owner, real, *tokens))
    target = jnp.where(live, slots, num_slots)
    return out, states.at[layer, target, 0].set(final.astype(states.dtype), mode="drop")


def _initial_states(states, layer, slots, state_offset, num_computed):
    initial = state_select(states, layer, slots, state_offset)
    fresh = (num_computed <= 0)[:, None, None, None]
    return jnp.where(fresh, 0.0, initial.astype(jnp.float32))


def product(equation, *operands):
    """`einsum` in full float32, which is not what a GPU does unasked."""
    return jnp.einsum(equation, *operands, precision="highest")

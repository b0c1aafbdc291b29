"""Pallas (Mosaic GPU) kernel of `gdn_step` for Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.pallas.gpu import access
from jaxspec.pallas.recurrent.step_block import Recurrence, launch


@functools.partial(jax.jit, static_argnames="interpret")
def gdn_step_kernel(tokens, states, layer, rows, *, interpret=None):
    """Run `gdn_step`; `step_block` describes the work of a block."""
    rule = Recurrence(shared=lambda tokens: (tokens.q, tokens.k), load=_load, advance=_advance)
    return launch("gdn_step", rule, tokens, states, layer, rows, interpret)


def _load(tokens, block):
    """Load each token's values `[block values]`, decay and write strength into registers."""
    row, head, width = block.row, block.head, tokens.v.shape[1]
    decays = [jnp.exp(tokens.g[row, t, head]) for t in range(width)]
    betas = [tokens.beta[row, t, head] for t in range(width)]
    refs = [tokens.v.at[row, t, head, block.values] for t in range(width)]
    values = [access.load(ref, block.value_layout) for ref in refs]
    return list(zip(values, decays, betas, strict=True))


def _advance(state, q, k, operands):
    """Return the state `[block values, key_dim]` after a token, and what `q` reads from it."""
    v, decay, beta = operands
    state = state * decay
    recalled = jnp.sum(state * lax.broadcast_in_dim(k, state.shape, (1,)), axis=1)
    write = lax.broadcast_in_dim((v - recalled) * beta, state.shape, (0,))
    state = state + write * lax.broadcast_in_dim(k, state.shape, (1,))
    return state, jnp.sum(state * lax.broadcast_in_dim(q, state.shape, (1,)), axis=1)

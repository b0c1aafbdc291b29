"""Pallas (Mosaic GPU) kernels of `gdn_step` and `gdn_scan` for Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.pallas.gpu import access
from jaxspec.pallas.recurrent.scan_block import launch_scan
from jaxspec.pallas.recurrent.step_block import Recurrence, launch


@functools.partial(jax.jit, static_argnames="interpret")
def gdn_step_kernel(tokens, states, layer, rows, *, interpret=None):
    """Run `gdn_step`; `step_block` describes the work of a block."""
    return launch("gdn_step", _rule_of(tokens), tokens, states, layer, rows, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def gdn_scan_kernel(tokens, states, layer, rows, *, interpret=None):
    """Run `gdn_scan`; `scan_block` describes the work of a block."""
    rule = _rule_of(tokens)
    by_width = jax.tree.map(lambda x: x[:, None], tokens)
    return launch_scan("gdn_scan", rule, by_width, states, layer, rows, interpret)


def _rule_of(tokens) -> Recurrence:
    """Return the recurrence for the kind of the tokens' decay."""
    return _BY_CHANNEL if tokens.g.ndim == tokens.v.ndim else _BY_HEAD


def _load(tokens, block):
    """Load each token's values `[block values]` and write strength into registers."""
    row, head, width = block.row, block.head, tokens.v.shape[1]
    betas = [tokens.beta[row, t, head] for t in range(width)]
    refs = [tokens.v.at[row, t, head, block.values] for t in range(width)]
    values = [access.load(ref, block.value_layout) for ref in refs]
    return list(zip(values, betas, strict=True))


def _load_with_decays(tokens, block):
    """Like `_load`, with the decay of each token's head."""
    decays = [jnp.exp(tokens.g[block.row, t, block.head]) for t in range(tokens.g.shape[1])]
    return list(zip(_load(tokens, block), decays, strict=True))


def _advance_by_head(state, q, k, operands):
    operands, decay = operands
    return _advance(state * decay, q, k, operands)


def _advance_by_channel(state, q, k, g, operands):
    return _advance(state * lax.broadcast_in_dim(jnp.exp(g), state.shape, (1,)), q, k, operands)


def _advance(state, q, k, operands):
    """Return the state `[block values, key_dim]` after a token, and what `q` reads from it.

    `state` is decayed already.
    """
    v, beta = operands
    recalled = jnp.sum(state * lax.broadcast_in_dim(k, state.shape, (1,)), axis=1)
    write = lax.broadcast_in_dim((v - recalled) * beta, state.shape, (0,))
    state = state + write * lax.broadcast_in_dim(k, state.shape, (1,))
    return state, jnp.sum(state * lax.broadcast_in_dim(q, state.shape, (1,)), axis=1)


_BY_HEAD = Recurrence(
    shared=lambda tokens: (tokens.q, tokens.k), load=_load_with_decays, advance=_advance_by_head
)
_BY_CHANNEL = Recurrence(
    shared=lambda tokens: (tokens.q, tokens.k, tokens.g), load=_load, advance=_advance_by_channel
)

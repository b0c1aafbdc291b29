"""Kernels of `mamba2_step` and `mamba2_scan` (Pallas, Mosaic GPU)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.pallas.gpu import access
from jaxspec.pallas.recurrent.scan_block import launch_scan
from jaxspec.pallas.recurrent.step_block import Recurrence, launch


@functools.partial(jax.jit, static_argnames="interpret")
def mamba2_step_kernel(tokens, states, layer, rows, *, interpret=None):
    """Run `mamba2_step`; `step_block` describes the work of a block."""
    return launch("mamba2_step", _RULE, tokens, states, layer, rows, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def mamba2_scan_kernel(tokens, states, layer, rows, *, interpret=None):
    """Run `mamba2_scan`; `scan_block` describes the work of a block."""
    x, dt, b, c = (y[:, None] for y in (tokens.x, tokens.dt, tokens.b, tokens.c))
    by_width = tokens._replace(x=x, dt=dt, b=b, c=c)
    return launch_scan("mamba2_scan", _RULE, by_width, states, layer, rows, interpret)


def _load(tokens, block):
    """Load each token's `x` `[block values]`, `dt`, decay `exp(A dt)` and `D` into registers."""
    row, head, width = block.row, block.head, tokens.x.shape[1]
    dts = [tokens.dt[row, t, head] for t in range(width)]
    decays, skip = [jnp.exp(tokens.a[head] * dt) for dt in dts], tokens.d[head]
    refs = [tokens.x.at[row, t, head, block.values] for t in range(width)]
    xs = [access.load(ref, block.value_layout) for ref in refs]
    return [(x, dt, decay, skip) for x, dt, decay in zip(xs, dts, decays, strict=True)]


def _advance(state, b, c, operands):
    """Return the state `[block values, state_dim]` after one token, and `S C + D x`."""
    x, dt, decay, skip = operands
    x = x.astype(jnp.float32)
    new = x * dt
    b, c = (lax.broadcast_in_dim(y.astype(jnp.float32), state.shape, (1,)) for y in (b, c))
    state = state * decay + lax.broadcast_in_dim(new, state.shape, (0,)) * b
    return state, jnp.sum(state * c, axis=1) + skip * x


_RULE = Recurrence(shared=lambda tokens: (tokens.b, tokens.c), load=_load, advance=_advance)

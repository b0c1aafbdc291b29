"""Prefill of Mamba2: chunks of prompts laid flat, one final state a sequence."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.step import advance
from jaxspec.pallas.recurrent.chunks import chunk_by_chunk, product, token_by_token

_States = Float[Array, "layers slots candidates heads head_dim state_dim"]


def mamba2_prefill(
    x: Float[Array, "tokens heads head_dim"],
    dt: Float[Array, "tokens heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "tokens groups state_dim"],
    c: Float[Array, "tokens groups state_dim"],
    d: Float[Array, " heads"],
    states: _States,
    layer: int,
    slots: Int[Array, " seqs"],
    state_offset: Int[Array, " seqs"],
    num_computed: Int[Array, " seqs"],
    query_start: Int[Array, " seqs+1"],
) -> tuple[Float[Array, "tokens heads head_dim"], _States]:
    """The selective state space over each sequence: float32 outputs, and the new pool.

    The law, the dtypes and the grouping of heads are `mamba2_step`'s. Sequence `s` is
    `query_start[s]:query_start[s + 1]`. It starts from zero when `num_computed` is 0, else from its
    slot's candidate `state_offset`, and leaves its final state as candidate 0. Empty sequences and
    slot 0 leave the pool untouched; tokens outside every sequence come out as 0.

    If `x` has 16 bits, the kernel rounds to its dtype `B`, `C` and whatever else tensor cores
    multiply, and sums in float32: in bfloat16 its error is a few 1e-3, in float16 an eighth of
    that, as long as every `B . C` and every state is below 65504.

    Chunked (Dao and Gu 2024, arXiv 2405.21060, section 6): with `G` the running sum of `A dt` from
    the chunk's start and `S_0` the state there, up to a chunk's last token `T`

        y_t = e^{G_t} S_0 C_t + sum_{i<=t} e^{G_t - G_i} (B_i . C_t) dt_i x_i + D x_t
        S_T = e^{G_T} S_0 + sum_i e^{G_T - G_i} dt_i x_i B_i^T
    """
    tokens = (x, dt, a, b, c, d)
    index = (slots, state_offset, num_computed, query_start)
    if dispatch.runs_kernel("mamba2_prefill", _unsupported(x, states)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.mamba2.prefill_kernel import prefill

        return prefill(*tokens, states, dispatch.layer_index(states, layer), *index)
    return _mamba2_prefill_chunked(*tokens, states, layer, *index)


def _unsupported(x, states):
    """Why the kernel does not take these operands, or None."""
    head_dim, state_dim = states.shape[4:]
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokens in {x.dtype}, not 16 bits"
    if states.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    if head_dim not in (64, 128) or state_dim not in (64, 128):
        return f"heads of {head_dim} x {state_dim}, not 64 or 128"
    if x.shape[0] % 8:
        return f"{x.shape[0]} tokens, no multiple of 8"
    return None


def _mamba2_prefill_chunked(x, dt, a, b, c, d, states, layer, *index):
    """`mamba2_prefill` for XLA: one chunk after the other, of all heads at once."""

    def step(state, x, dt, b, c):
        return _chunk(state, *(y.astype(jnp.float32) for y in (x, dt, a, b, c, d)))

    return chunk_by_chunk(step, (x, dt, b, c), states, layer, *index)


def _chunk(state, x, dt, a, b, c, d):
    """One chunk: the state `[heads, head_dim, state_dim]` after it, and its outputs.

    A padding token is all zeros, and so changes nothing.
    """
    size, group = x.shape[0], x.shape[1] // b.shape[1]
    at_or_before = jnp.tril(jnp.ones((size, size), jnp.float32))
    before = jnp.tril(jnp.ones((size, size), jnp.float32), -1)
    # Logs of decays are summed over i < j <= t, not subtracted: terms of one sign lose no digits.
    logs = a[None] * dt
    decay = jnp.exp(product("tj,jh,ji->hti", at_or_before, logs, before)) * at_or_before[None]
    from_start = jnp.exp(product("tj,jh->th", at_or_before, logs))[..., None]

    alike = jnp.repeat(product("tgn,ign->gti", c, b), group, axis=0)
    b, c = (jnp.repeat(y, group, axis=1) for y in (b, c))
    new = dt[..., None] * x
    out = from_start * product("hpn,thn->thp", state, c) + d[None, :, None] * x
    out = out + product("hti,ihp->thp", decay * alike, new)
    to_end = decay[:, -1].T[..., None]
    state = from_start[-1][..., None] * state + product("ihp,ihn->hpn", to_end * new, b)
    return state, out


def mamba2_prefill_reference(x, dt, a, b, c, d, states, layer, *index):
    """The specification of `mamba2_prefill`: one token after the other."""

    def step(state, *token):
        x, dt, b, c = (y[None] for y in token)
        state, out = advance(state[None], x, dt, a, b, c)
        return state[0], out[0] + d[:, None] * x[0].astype(jnp.float32)

    return token_by_token(step, (x, dt, b, c), states, layer, *index)

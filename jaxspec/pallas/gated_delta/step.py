"""Steps of Gated DeltaNet: of rows of a few tokens, and of a region's tokens in order."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnTokens, States, Values, over_state
from jaxspec.pallas.recurrent.state_select import (
    check_candidates,
    state_select_reference,
    state_write_reference,
    why_not_states,
)
from jaxspec.pallas.recurrent.token_scan import scan_in_order
from jaxspec.regions import DecodeRegion, TokenRegion


def gdn_step(
    tokens: GdnTokens, states: States, layer: int, rows: DecodeRegion
) -> tuple[Values, States]:
    """Run the gated delta rule over each row's tokens; return float32 outputs, and the new pool.

    Per token and value head, with `S [value_dim, key_dim]` in float32 (Yang et al. 2024, "Gated
    Delta Networks", arXiv 2412.06464, equation 10):

        S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q

    A decay by channel multiplies the columns of `S` (Kimi Team 2025, "Kimi Linear", arXiv
    2510.26692): `S <- S diag(exp(g))`.

    `tokens` are `[rows, width, ...]`, and the outputs have the shape of `v`. The initial state is
    the slot's candidate `state_offset`; the state after token `t` becomes candidate `t` for
    `t < query_len`. To roll back to `a` accepted drafts, the next step reads candidate `a`. Padding
    rows and tokens write nothing, and their outputs are undefined. In FLA this is
    `fused_recurrent_gated_delta_rule`.

    The kernel multiplies and adds in float32 even for 16-bit states: it is bound by their bytes, so
    tensor cores would hardly help (op gdn_step in benchmarks/results/kernels_h200.json).

    Raises:
        ValueError: The pool has fewer candidates than tokens per row.
    """
    width = tokens.q.shape[1]
    check_candidates(states, width)
    why = f"{width} tokens a row, more than 8" if width > 8 else why_not_states(states)
    if dispatch.runs_kernel("gdn_step", why, rows=tokens.q.shape[0]):
        from jaxspec.pallas.gated_delta.step_kernel import gdn_step_kernel

        return gdn_step_kernel(tokens, states, dispatch.layer_index(states, layer), rows)
    if width > 1 and tokens.g.ndim == tokens.beta.ndim:
        return _gdn_step_together(tokens, states, layer, rows)
    return gdn_step_reference(tokens, states, layer, rows)


def gdn_step_reference(tokens, states, layer, rows):
    """Reference for `gdn_step`: one token after the other."""
    state = state_select_reference(states, layer, rows).astype(jnp.float32)
    outputs, after = [], []
    for t in range(tokens.q.shape[1]):
        state, y = advance(state, GdnTokens(*(x[:, t] for x in tokens)))
        outputs.append(y)
        after.append(state)

    states = state_write_reference(states, layer, rows, jnp.stack(after, axis=1))
    return jnp.stack(outputs, axis=1), states


def advance(
    state: Float[Array, "rows heads value_dim key_dim"], token: GdnTokens
) -> tuple[Array, Array]:
    """Return the state after one token per row, and what its query reads, in float32."""
    q, k, v, g, beta = token
    q, k = (jnp.repeat(x, state.shape[1] // x.shape[1], axis=1) for x in (q, k))
    state = state * over_state(jnp.exp(g), state)
    recalled = jnp.einsum("rhvk,rhk->rhv", state, k, precision="highest")
    delta = beta[..., None] * (v - recalled)
    state = state + delta[..., None] * k[..., None, :]
    return state, jnp.einsum("rhvk,rhk->rhv", state, q, precision="highest")


def _gdn_step_together(tokens, states, layer, rows):
    """`gdn_step` in XLA, all tokens at once, for a decay per head."""
    state = state_select_reference(states, layer, rows).astype(jnp.float32)
    group = states.shape[3] // tokens.q.shape[2]
    q, k = (jnp.moveaxis(jnp.repeat(x, group, axis=2), 1, 2) for x in (tokens.q, tokens.k))
    v, g, beta = (jnp.moveaxis(x, 1, 2) for x in (tokens.v, tokens.g, tokens.beta))
    # A draft may overflow, padding may hold anything, and 0 * NaN is NaN. Operands are zeroed from
    # the first non-finite token on, so that earlier tokens are not affected.
    finite = jnp.isfinite(k).all(axis=3) & jnp.isfinite(v).all(axis=3) & jnp.isfinite(beta)
    sound = jnp.cumprod(finite & ~jnp.isnan(g), axis=2) > 0
    k, v = (jnp.where(sound[..., None], x, 0.0) for x in (k, v))
    g, beta = (jnp.where(sound, x, 0.0) for x in (g, beta))
    outputs, after = _all_tokens(GdnTokens(q, k, v, g, beta), state)
    outputs = jnp.where(sound[..., None], outputs, jnp.nan)
    after = jnp.where(sound[..., None, None], after, jnp.nan)
    states = state_write_reference(states, layer, rows, jnp.moveaxis(after, 2, 1))
    return jnp.moveaxis(outputs, 2, 1), states


def _all_tokens(
    tokens: GdnTokens, state: Float[Array, "rows heads value_dim key_dim"]
) -> tuple[Array, Array]:
    """Return outputs, and the states after each token `[rows, heads, width, value_dim, key_dim]`.

    `tokens` are `[rows, heads, width, ...]`, with queries and keys repeated for each value head.
    The updates `u_t` of all tokens are solved at once (paper, section 3.3), because token by token
    XLA would recompute every state from the first wherever it is used. With `G` the running sum of
    `g` and `D[t, i] = exp(G_t - G_i)` for `i <= t`, else 0:

        S_t = exp(G_t) S_0 + sum_i D[t, i] u_i k_i^T
        u_t = beta_t (v_t - exp(G_t) S_0 k_t - sum_{i<t} D[t, i] (k_i . k_t) u_i)
    """
    q, k, v, g, beta = tokens
    width = q.shape[2]
    dot = functools.partial(jnp.einsum, precision="highest")
    # G_t - G_i is a separate sum: the difference of two sums loses digits after a strong decay.
    t, i, j = (jnp.arange(width).reshape(shape) for shape in ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
    between = jnp.broadcast_to((i < j) & (j <= t), (*g.shape[:2], width, width, width))
    log_decay = jnp.sum(jnp.where(between, g[:, :, None, None, :], 0.0), axis=4)
    decay = jnp.tril(jnp.exp(log_decay))
    from_start = jnp.exp(jnp.cumsum(g, axis=2))[..., None]

    both = jnp.concatenate([k, q], axis=2)
    state_reads = jnp.swapaxes(dot("rhvk,rhkt->rhvt", state, jnp.swapaxes(both, 2, 3)), 2, 3)
    dots = dot("rhtk,rhik->rhti", both, k)
    kk, qk = dots[:, :, :width], dots[:, :, width:]
    wanted = beta[..., None] * (v - from_start * state_reads[:, :, :width])
    coupling = jnp.tril(beta[..., None] * decay * kk, -1)
    updates = dot("rhti,rhiv->rhtv", _inverse(coupling), wanted)

    outputs = from_start * state_reads[:, :, width:]
    outputs = outputs + dot("rhti,rhiv->rhtv", decay * qk, updates)
    decayed = decay[:, :, :, None, :] * jnp.swapaxes(updates, 2, 3)[:, :, None]
    added = dot("rhtvi,rhik->rhtvk", decayed, k)
    return outputs, from_start[..., None] * state[:, :, None] + added


def _inverse(strictly_lower: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
    """`(1 + A)^-1 = (1 - A)(1 + A^2)(1 + A^4)...`; the product ends because `A^n = 0`."""

    def times(a, b):  # elementwise: calling a matmul this small costs more than computing it
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)

    n = strictly_lower.shape[-1]
    one = jnp.broadcast_to(jnp.eye(n, dtype=strictly_lower.dtype), strictly_lower.shape)
    power, inverse, terms = -strictly_lower, one - strictly_lower, 2
    while terms < n:
        power = times(power, power)
        inverse = times(inverse, one + power)
        terms *= 2
    return inverse


def gdn_scan(
    tokens: GdnTokens, states: States, layer: int, rows: TokenRegion
) -> tuple[Values, States]:
    """Return float32 outputs and the new pool, as `gdn_step` of each token by itself would.

    `tokens` are `[tokens, ...]`. A token starts from its slot's candidate `state_offset`, a
    prompt's first one from zeros, and stores its state as `candidate`. Where the next token of the
    slot stores the same candidate, the kernel stores only the later state.
    """
    why, num_tokens = why_not_states(states), tokens.q.shape[0]
    if dispatch.runs_kernel("gdn_scan", why, rows=num_tokens):
        from jaxspec.pallas.gated_delta.step_kernel import gdn_scan_kernel

        return gdn_scan_kernel(tokens, states, dispatch.layer_index(states, layer), rows)
    return gdn_scan_reference(tokens, states, layer, rows)


def gdn_scan_reference(tokens, states, layer, rows):
    if not len(tokens.v):
        return tokens.v.astype(jnp.float32), states

    def one(state, index):
        return advance(state, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1), tokens))

    return scan_in_order(one, states, layer, rows)

"""Log-probabilities and ranks of tokens, and the likeliest ids at their positions."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.row_tiles import by_rows, is_deterministic
from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.requests.sampling_params import MAX_LOGPROBS
from jaxspec.sampling.candidates import largest
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.processors import process_logits


def report_logprobs(
    logits: Float[Array, "n vocab"],
    tokens: Int[Array, " n"],
    num_reported: Int[Array, " n"],
    reports_processed: Int[Array, " n"],
    reported: Callable[[], Float[Array, "n vocab"]],
) -> Int[Array, "n fields"]:
    """Return the fields of `pack_logprobs`, or only those of tokens if no row lists others.

    A GPU decides it inside the step's CUDA graph, without the host.

    Args:
        logits: The model's (float32), at the position of each token.
        tokens: int32; the fields of -1 are meaningless.
        num_reported: int32, as in `plan.row.SAMPLING_FIELDS`.
        reports_processed: int32, as in `plan.row.SAMPLING_FIELDS`.
        reported: Returns the logits that each row reports (`reported_logits`).
    """
    if not len(logits):
        return jnp.zeros((0, LAYOUT.size), jnp.int32)
    most = jnp.minimum(jnp.max(num_reported), 2)
    is_processed = jnp.any((num_reported > 0) & (reports_processed > 0))
    return jax.lax.switch(
        jnp.where(is_processed, most + 2, most),
        [
            lambda: jnp.zeros((len(logits), LAYOUT.size), jnp.int32),
            lambda: _pack_alone(logits, tokens),
            lambda: pack_logprobs(logits, tokens),
            lambda: _pack_alone(reported(), tokens),
            lambda: pack_logprobs(reported(), tokens),
        ],
    )


def unless_raw(
    reports_processed: Int[Array, " rows"],
    reported: Callable[[], Float[Array, "n vocab"]],
    logits: Float[Array, "n vocab"],
) -> Float[Array, "n vocab"]:
    """Return `reported()`, or `logits` without calling it if no row reports processed logprobs.

    A GPU decides it inside the step's CUDA graph, without the host, and then only copies `logits`.
    """
    return jax.lax.cond(jnp.any(reports_processed > 0), reported, lambda: logits)


def reported_logits(
    logits: Float[Array, "n vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, " n"],
    *,
    features: SamplingFeatures,
) -> Float[Array, "n vocab"]:
    """Return the logits (float32) of the distribution whose logprobs each row reports.

    These are the raw ones, bitwise, or with `reports_processed` those of `process_logits`, of which
    a greedy row has no temperature, min-p, top-k or top-p. A forced id (+inf) has all of the mass,
    the lowest one of several. Arguments are as in `process_logits`.
    """
    if not len(logits):
        return logits
    is_processed = inputs.reports_processed > 0
    # Others search nothing for their top-k and top-p.
    is_cut = is_processed & ~inputs.is_greedy
    off = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}
    cut = {name: jnp.where(is_cut, getattr(inputs, name), value) for name, value in off.items()}
    own = dataclasses.replace(inputs, columns=inputs.columns | cut)
    processed = process_logits(logits, own, positions, features=features)
    return jnp.where(is_processed[:, None], _forced(processed), logits)


def _forced(logits: Float[Array, "n vocab"]) -> Float[Array, "n vocab"]:
    """Return finite logits of the same draws: 0 for a row's first +inf, and -inf for other ids."""
    first = jnp.argmax(logits, axis=1, keepdims=True)
    is_forced = jnp.isposinf(jnp.take_along_axis(logits, first, axis=1))
    is_drawn = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :] == first
    return jnp.where(is_forced, jnp.where(is_drawn, 0.0, -jnp.inf), logits)


def pack_logprobs(
    logits: Float[Array, "n vocab"], tokens: Int[Array, " n"]
) -> Int[Array, "n fields"]:
    """Return the fields of `logprobs.LAYOUT` for each of `tokens`, packed as int32.

    `logits` (float32) are those at the token's position. The fields of a token of -1 are
    meaningless. The logits are read twice: for the maxima of `largest`, then for the sum and the
    rank together.
    """
    if not len(logits):
        return jnp.zeros((0, LAYOUT.size), jnp.int32)
    return by_rows(_packed, logits, tokens)


def _packed(logits: Float[Array, "n vocab"], tokens: Int[Array, " n"]) -> Int[Array, "n fields"]:
    return _pack(logits, tokens, *largest(logits, min(MAX_LOGPROBS, logits.shape[1])))


def _pack_alone(
    logits: Float[Array, "n vocab"], tokens: Int[Array, " n"]
) -> Int[Array, "n fields"]:
    """Return the fields without the likeliest ids (in a deterministic engine: with them)."""
    if is_deterministic():  # another maximum would change the order in which XLA sums
        return pack_logprobs(logits, tokens)
    likeliest = jnp.max(logits, axis=1, keepdims=True)
    return _pack(logits, tokens, likeliest, jnp.full(likeliest.shape, NO_TOKEN, jnp.int32))


def _pack(
    logits: Float[Array, "n vocab"],
    tokens: Int[Array, " n"],
    top_logits: Float[Array, "n count"],
    top_ids: Int[Array, "n count"],
) -> Int[Array, "n fields"]:
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)
    total = jnp.sum(jnp.exp(logits - top_logits[:, :1]), axis=1)
    missing = (0, 0), (0, MAX_LOGPROBS - top_ids.shape[1])
    num_larger = jnp.sum(logits > own, axis=1, dtype=jnp.int32)
    fields = {
        "logit": own[:, 0],
        "rank": 1 + num_larger,
        "log_total": jnp.log(total),
        "top_ids": jnp.pad(top_ids, missing, constant_values=NO_TOKEN),
        "top_logits": jnp.pad(top_logits, missing, constant_values=-jnp.inf),
    }
    return jnp.concatenate([LAYOUT.bits(name, fields[name]) for name in LAYOUT.fields], axis=1)

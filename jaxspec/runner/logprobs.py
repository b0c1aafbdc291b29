"""Logprobs of the prompt tokens of a step."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.base import Model
from jaxspec.regions import owner_of
from jaxspec.requests.request import INT32_MAX
from jaxspec.requests.sampling_features import (
    MIN_P,
    PROMPT_LOGPROBS,
    SMALL_TOP_K,
    TEMPERATURE,
    TOP_K_TOP_P,
    SamplingFeatures,
)
from jaxspec.runner.draft_inputs import next_tokens
from jaxspec.runner.prepare import StepInputs
from jaxspec.runner.verify import sampling_inputs
from jaxspec.sampling import Acceptance, SamplingInputs
from jaxspec.sampling.logprobs import pack_logprobs, reported_logits, unless_raw

# Processors of logits that depend on no other token.
_OF_PROMPTS = TEMPERATURE, MIN_P, SMALL_TOP_K, TOP_K_TOP_P
_PIECE = 256  # prompt tokens scored at once, as many as 64 rows with 3 drafts verify


def prompt_logprobs(
    model: Model,
    hidden: Float[Array, "tokens hidden"],
    inputs: StepInputs,
    acceptance: Acceptance,
    features: SamplingFeatures,
) -> Int[Array, "prompt_tokens fields"] | None:
    """Return the packed logprobs of the token after each prompt token that the step computes.

    `hidden` is the trunk's output for all tokens of the step. The logprobs are those of raw logits,
    or of logits after temperature, min-p, top-k and top-p, as each row wants them. The token after
    a chunk is in the plan, so none is missing between chunks. Tokens are scored in parts, because
    the logits of 2,048 tokens and 248,320 ids would take 2 GB. Returns None if `features` do not
    report them, or the program has no prompt tokens.
    """
    if PROMPT_LOGPROBS not in features or inputs.model.prefill is None:
        return None
    _, hidden = inputs.places.split_tokens(hidden)
    _, tokens = inputs.places.split_tokens(next_tokens(inputs, acceptance))
    count = len(tokens)
    size = min(_PIECE, max(count, 1))
    num_pieces = -(-count // size)
    missing = num_pieces * size - count

    def in_pieces(x: Array) -> Array:
        padded = jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))
        return padded.reshape(num_pieces, size, *x.shape[1:])

    cuts = SamplingFeatures.of(*(name for name in _OF_PROMPTS if name in features))

    def packed(piece: tuple[Array, Array, dict[str, Array]]) -> Array:
        hidden, tokens, columns = piece
        logits = model.logits(hidden)
        if cuts.processors:
            rows, positions = SamplingInputs(columns), jnp.full(size, INT32_MAX, jnp.int32)
            reported = functools.partial(reported_logits, logits, rows, positions, features=cuts)
            logits = unless_raw(rows.reports_processed, reported, logits)
        return pack_logprobs(logits, tokens)

    columns = _columns_of_tokens(inputs, count) if cuts.processors else {}
    fields = jax.lax.map(packed, jax.tree.map(in_pieces, (hidden, tokens, columns)))
    return fields.reshape(num_pieces * size, fields.shape[2])[:count]


def _columns_of_tokens(inputs: StepInputs, count: int) -> dict[str, Array]:
    """Return the sampling parameters of each prompt token's row; those of padding are arbitrary."""
    _, rows = inputs.places.split_rows(sampling_inputs(inputs.active).columns)
    assert inputs.model.prefill is not None
    ends = inputs.model.prefill.query_start[1:]
    chunk = owner_of(jnp.arange(count, dtype=jnp.int32), ends)
    return jax.tree.map(lambda column: column[chunk], rows)

"""Logprobs of a step: those of emitted tokens and of prompt tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.base import Model
from jaxspec.requests.sampling_features import LOGPROBS, PROMPT_LOGPROBS, SamplingFeatures
from jaxspec.runner.draft_inputs import next_tokens
from jaxspec.runner.prepare import StepInputs
from jaxspec.sampling import Acceptance
from jaxspec.sampling.logprobs import pack_logprobs

_PIECE = 256  # prompt tokens scored at once, as many as 64 rows with 3 drafts verify


def emitted_logprobs(
    logits: Float[Array, "scored vocab"] | None,
    inputs: StepInputs,
    acceptance: Acceptance,
    features: SamplingFeatures,
) -> Int[Array, "active width fields"] | None:
    """Return the packed logprobs of each emitted token, at its place in `acceptance.tokens`.

    `logits` (float32) are the target's at `inputs.logits_indices`. Logits at place j of a row
    predict its j-th emitted token. Fields after the last emitted token are arbitrary. Returns None
    if `features` do not report logprobs.
    """
    if LOGPROBS not in features or logits is None:
        return None
    places = inputs.places
    verified, ends = places.split_rows(acceptance.tokens)
    tokens = jnp.concatenate([verified.reshape(-1), ends[:, 0]])
    fields, end_fields = places.split_tokens(pack_logprobs(logits, tokens))
    padding = (0, 0), (0, places.width - 1), (0, 0)
    return jnp.concatenate([places.rectangle(fields), jnp.pad(end_fields[:, None], padding)])


def prompt_logprobs(
    model: Model,
    hidden: Float[Array, "tokens hidden"],
    inputs: StepInputs,
    acceptance: Acceptance,
    features: SamplingFeatures,
) -> Int[Array, "prompt_tokens fields"] | None:
    """Return the packed logprobs of the token after each prompt token that the step computes.

    `hidden` is the trunk's output for all tokens of the step. The token after a chunk is in the
    plan, so none is missing between chunks. Tokens are scored in parts, because the logits of 2,048
    tokens and 248,320 ids would take 2 GB. Returns None if `features` do not report them, or the
    program has no prompt tokens.
    """
    if PROMPT_LOGPROBS not in features or inputs.model.prefill is None:
        return None
    _, hidden = inputs.places.split_tokens(hidden)
    _, tokens = inputs.places.split_tokens(next_tokens(inputs, acceptance))
    count = len(tokens)
    size = min(_PIECE, max(count, 1))
    num_pieces = -(-count // size)
    missing = num_pieces * size - count
    blocks = (
        jnp.pad(hidden, ((0, missing), (0, 0))).reshape(num_pieces, size, hidden.shape[1]),
        jnp.pad(tokens, (0, missing)).reshape(num_pieces, size),
    )
    fields = jax.lax.map(lambda block: pack_logprobs(model.logits(block[0]), block[1]), blocks)
    return fields.reshape(num_pieces * size, fields.shape[2])[:count]

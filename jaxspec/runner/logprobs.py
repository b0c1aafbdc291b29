"""Logprobs of a step: of the tokens that its rows emit, and of the prompt tokens that it reads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.base import Model
from jaxspec.runner.draft_inputs import next_tokens
from jaxspec.runner.prepare import StepInputs
from jaxspec.sampler import LOGPROBS, PROMPT_LOGPROBS, Sampler
from jaxspec.sampling import Acceptance
from jaxspec.sampling.logprobs import pack_logprobs

_PIECE = 256  # prompt tokens scored at once: as many as 64 rows with 3 drafts verify


def emitted_logprobs(
    logits: Float[Array, "scored vocab"] | None,
    inputs: StepInputs,
    acceptance: Acceptance,
    sampler: Sampler,
) -> Int[Array, "active width fields"] | None:
    """What is reported of each emitted token, at its place in `acceptance.tokens`.

    `logits` (float32) are the target's own at `inputs.logits_indices`. The logits of a place decide
    on the token behind it, so the j-th of a row's tokens is scored by its j-th place. Behind the
    last emitted token the fields mean nothing. None: the `sampler` reports none.
    """
    if LOGPROBS not in sampler or logits is None:
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
    sampler: Sampler,
) -> Int[Array, "prompt_tokens fields"] | None:
    """What is reported of the token behind each prompt token that the step computes.

    `hidden` is the trunk's output for all of the step's tokens. Behind a chunk comes the prompt's
    next token, which the plan names, so no chunk's border loses one. In pieces, because the logits
    of 2,048 tokens and 248,320 ids would be 2 GB. None: the `sampler` reports none, or the program
    has no prompt.
    """
    if PROMPT_LOGPROBS not in sampler or inputs.model.prefill is None:
        return None
    _, hidden = inputs.places.split_tokens(hidden)
    _, tokens = inputs.places.split_tokens(next_tokens(inputs, acceptance))
    count = len(tokens)
    size = min(_PIECE, max(count, 1))
    num_pieces = -(-count // size)
    missing = num_pieces * size - count
    pieces = (
        jnp.pad(hidden, ((0, missing), (0, 0))).reshape(num_pieces, size, hidden.shape[1]),
        jnp.pad(tokens, (0, missing)).reshape(num_pieces, size),
    )
    fields = jax.lax.map(lambda piece: pack_logprobs(model.logits(piece[0]), piece[1]), pieces)
    return fields.reshape(num_pieces * size, fields.shape[2])[:count]

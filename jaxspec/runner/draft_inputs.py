"""Draft: the proposer's view of a step, every token's successor and where each row now stands."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config import Variant
from jaxspec.models.base import ForwardOutput
from jaxspec.proposers.base import DraftInputs
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.prepare import StepInputs
from jaxspec.runner.verify import sampling_inputs
from jaxspec.sampling import Acceptance


def draft_inputs(
    output: ForwardOutput,
    inputs: StepInputs,
    acceptance: Acceptance,
    active: BatchState,
    variant: Variant,
) -> DraftInputs:
    """What a proposer may read. `active` are the updated rows, in the order of `inputs.active`."""
    num_rows, width = inputs.model.decode.slots.shape[0], inputs.model.width
    last_valid = jnp.maximum(acceptance.num_emitted[:num_rows] - 1, 0)
    ends = inputs.logit_index[num_rows * width :]
    return DraftInputs(
        model=inputs.model,
        hidden=output.hidden,
        aux_hidden=output.aux_hidden,
        next_tokens=next_tokens(inputs, acceptance),
        last_index=jnp.concatenate([jnp.arange(num_rows) * width + last_valid, ends]),
        slots=active.slot,
        num_computed=active.num_computed,
        max_len=active.max_len,
        last_token=active.last_token,
        should_draft=active.is_live & (acceptance.num_emitted > 0),
        proposer_key=active.proposer_key,
        sampling=sampling_inputs(active),
        page_size=inputs.page_size,
        variant=variant,
    )


def next_tokens(inputs: StepInputs, acceptance: Acceptance) -> Int[Array, " tokens"]:
    """The token after each of the step's tokens.

    A verified token is followed by what its row emitted there (junk behind the last one, whose keys
    and values are overwritten before they are read). A prompt token is followed by the next of its
    chunk; the last of a chunk by the prompt's next one, or by the token that the step emitted.
    """
    num_rows, width = inputs.model.decode.slots.shape[0], inputs.model.width
    emitted = jnp.maximum(acceptance.tokens, 0)
    after_verified = emitted[:num_rows].reshape(-1)
    if inputs.model.prefill is None:
        return after_verified
    chunk = inputs.model.tokens[num_rows * width :]
    start = inputs.model.prefill.query_start
    last = jnp.where(start[1:] > start[:-1], start[1:] - 1, chunk.shape[0])
    after_end = jnp.where(inputs.lookahead < 0, emitted[num_rows:, 0], inputs.lookahead)
    shifted = jnp.pad(chunk[1:], (0, 1)).at[last].set(after_end, mode="drop")
    return jnp.concatenate([after_verified, shifted])

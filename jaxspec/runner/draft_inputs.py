"""`DraftInputs` of a step: the successor of each token, and the updated rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.models.base import ForwardOutput
from jaxspec.proposers.base import DraftInputs, HostPaths
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.device_plan import DevicePlan
from jaxspec.runner.prepare import StepInputs
from jaxspec.runner.verify import sampling_inputs
from jaxspec.sampling import Acceptance


def draft_inputs(
    output: ForwardOutput,
    inputs: StepInputs,
    acceptance: Acceptance,
    active: BatchState,
    plan: DevicePlan,
    features: SamplingFeatures,
) -> DraftInputs:
    """Return the inputs of the proposer; `active` are the updated rows of `inputs.active`."""
    places = inputs.places
    num_emitted, _ = places.split_rows(acceptance.num_emitted)
    newest = jnp.arange(places.num_rows) * places.width + jnp.maximum(num_emitted - 1, 0)
    _, ends = places.split_tokens(inputs.logits_indices)
    return DraftInputs(
        model=inputs.model,
        hidden=output.hidden,
        aux_hidden=output.aux_hidden,
        next_tokens=next_tokens(inputs, acceptance),
        last_index=jnp.concatenate([newest, ends]),
        slots=active.slot,
        num_computed=active.num_computed,
        max_len=active.max_len,
        num_emitted=num_emitted,
        state_offset=active.state_offset,
        ring_length=active.ring_length,
        last_token=active.last_token,
        should_draft=active.is_live & (acceptance.num_emitted > 0),
        proposer_key=active.proposer_key,
        sampling=sampling_inputs(active),
        paths=_paths(plan, inputs.index),
        page_size=inputs.page_size,
        features=features,
        num_drafts=places.width - 1,
    )


def _paths(plan: DevicePlan, index: Int[Array, " active"]) -> HostPaths | None:
    if plan.paths is None or plan.path_from is None or plan.path_match is None:
        return None
    columns = HostPaths(plan.paths, plan.path_from, plan.path_match)
    return jax.tree.map(lambda rows: rows.at[index].get(mode="fill", fill_value=-1), columns)


def next_tokens(inputs: StepInputs, acceptance: Acceptance) -> Int[Array, " tokens"]:
    """Return the token after each of the step's tokens.

    A verified token is followed by the token emitted at its place. After the last emitted one the
    result is arbitrary; the keys and values computed from it are overwritten before they are read.
    A prompt token is followed by the next token of its prompt, and the last one by the token that
    the step emitted.
    """
    verified, ends = inputs.places.split_rows(jnp.maximum(acceptance.tokens, 0))
    if inputs.model.prefill is None:
        return verified.reshape(-1)
    _, chunks = inputs.places.split_tokens(inputs.model.tokens)
    start = inputs.model.prefill.query_start
    last = jnp.where(start[1:] > start[:-1], start[1:] - 1, chunks.shape[0])
    known = inputs.next_prefill_token
    shifted = jnp.pad(chunks[1:], (0, 1))
    shifted = shifted.at[last].set(jnp.where(known < 0, ends[:, 0], known), mode="drop")
    return jnp.concatenate([verified.reshape(-1), shifted])

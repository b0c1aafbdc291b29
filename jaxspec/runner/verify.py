"""Verify: compute an `Acceptance` from hidden states, for decode rows and final prompt chunks."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.base import Model
from jaxspec.plan.row import SAMPLING_FIELDS
from jaxspec.requests.sampling_features import LOGPROBS, SamplingFeatures
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.prepare import Places, StepInputs
from jaxspec.runner.tables import grammar_states, step_tokens
from jaxspec.sampling import (
    NO_TOKEN,
    Acceptance,
    SamplingInputs,
    Verifier,
    draw,
    forbidden_ids,
)
from jaxspec.sampling.logprobs import report_logprobs, reported_logits
from jaxspec.sampling.tables import SamplingTables


def sampling_inputs(rows: BatchState) -> SamplingInputs:
    names = [field.name for field in SAMPLING_FIELDS]
    return SamplingInputs({name: getattr(rows, name) for name in names})


def _with_tables(inputs: StepInputs, tables: SamplingTables) -> tuple[SamplingInputs, ...]:
    """Return the sampling inputs of the rectangle and of chunk ends, with tables and drafts."""
    parts = inputs.places.split_rows(sampling_inputs(inputs.active))
    if tables.is_empty:
        return parts
    tokens = step_tokens(inputs)  # those of chunks are in the tables
    before = tokens, jnp.zeros((parts[1].seed.shape[0], 0), jnp.int32)
    # A chunk is computed up to its last token, like the rest of a decode row.
    columns = {"slot": inputs.active.slot, "num_computed": inputs.first_position - 1}
    return tuple(
        SamplingInputs(part.columns | more | states, tables, tokens)
        for part, more, states, tokens in zip(
            parts,
            inputs.places.split_rows(columns),
            grammar_states(inputs, tables),
            before,
            strict=True,
        )
    )


def verify(
    model: Model,
    hidden: Float[Array, "scored hidden"],
    inputs: StepInputs,
    draft_logits: Float[Array, "slots drafts vocab"] | None,
    verifier: Verifier,
    features: SamplingFeatures,
    tables: SamplingTables = SamplingTables(),  # noqa: B008  frozen, and without arrays
) -> tuple[Acceptance, Int[Array, "active width fields"] | None]:
    """Return the accepted drafts of each active row with the token after them, and logprobs.

    The end of a chunk is a row without drafts, which emits the target's token as in plain decoding.
    Rows that produce no token in this step (`inputs.produces_token`) get one here, too, which
    `truncate_at_stop` removes.

    Args:
        model: The target.
        hidden: Output of the trunk at `inputs.logits_indices`.
        inputs: Inputs of the step.
        draft_logits: Logits that sampled drafts were drawn from, by slot.
        verifier: Accepts or rejects drafts.
        features: Sampling features of the program.
        tables: Sampling tables that include the step's chunks (`with_chunks`).

    Returns:
        The acceptance, and `emitted_logprobs`.
    """
    places = inputs.places
    decode, ends = _with_tables(inputs, tables)
    first, end_positions = places.split_rows(inputs.first_position)
    offset = jnp.arange(places.width)[None, :]
    positions = first[:, None] + offset
    logits = model.logits(hidden) if features.makes_logits else None
    scored = (
        Scored(decode.repeat(places.width), positions.reshape(-1)),
        Scored(ends, end_positions),
    )
    tokens, end_tokens = _target_tokens(model, hidden, logits, places, *scored, features)
    # Mask the entries after each row's last draft, so that they are never accepted.
    num_drafts, _ = places.split_rows(inputs.num_draft_tokens)
    slots, _ = places.split_rows(inputs.active.slot)
    accepted = verifier(
        places.rectangle(tokens),
        None if logits is None else places.rectangle(places.split_tokens(logits)[0]),
        jnp.where(offset[:, 1:] <= num_drafts[:, None], inputs.drafts, NO_TOKEN),
        None if draft_logits is None else draft_logits[slots, : places.width - 1],
        decode,
        positions,
        features=features,
    )
    padding = (0, 0), (0, places.width - 1)
    emitted_at_ends = jnp.pad(end_tokens[:, None], padding, constant_values=NO_TOKEN)
    acceptance = Acceptance(
        tokens=jnp.concatenate([accepted.tokens, emitted_at_ends]),
        num_accepted=jnp.pad(accepted.num_accepted, (0, len(end_tokens))),
    )
    return acceptance, emitted_logprobs(logits, acceptance, places, scored, features)


class Scored(NamedTuple):
    """Sampling inputs of the target's token at each scored token, and its position."""

    inputs: SamplingInputs
    positions: Int[Array, " n"]


def _target_tokens(
    model: Model,
    hidden: Float[Array, "scored hidden"],
    logits: Float[Array, "scored vocab"] | None,
    places: Places,
    decode: Scored,
    ends: Scored,
    features: SamplingFeatures,
) -> tuple[Int[Array, " verified"], Int[Array, " ends"]]:
    """Return the tokens (int32) of plain decoding, in the rectangle and at chunk ends."""
    if logits is None:
        forbidden = jnp.concatenate([forbidden_ids(*decode), forbidden_ids(*ends)])
        return places.split_tokens(model.greedy_tokens(hidden, forbidden))
    verified, end_logits = places.split_tokens(logits)
    # Drawn separately: rejection sampling does not read the rectangle's, so XLA removes that draw.
    tokens = draw(verified, *decode, features=features)
    return tokens, draw(end_logits, *ends, features=features)


def emitted_logprobs(
    logits: Float[Array, "scored vocab"] | None,
    acceptance: Acceptance,
    places: Places,
    scored: tuple[Scored, Scored],
    features: SamplingFeatures,
) -> Int[Array, "active width fields"] | None:
    """Return the packed logprobs of each emitted token, at its place in `acceptance.tokens`.

    `logits` (float32) predict the token of each place. Fields after the last emitted token are
    arbitrary. Returns None if `features` do not report logprobs.
    """
    if logits is None or LOGPROBS not in features:
        return None

    def reported() -> Float[Array, "scored vocab"]:
        parts = zip(places.split_tokens(logits), scored, strict=True)
        return jnp.concatenate([reported_logits(x, *each, features=features) for x, each in parts])

    verified, ends = places.split_rows(acceptance.tokens)
    tokens = jnp.concatenate([verified.reshape(verified.size), ends[:, 0]])
    packed = report_logprobs(
        logits,
        tokens,
        jnp.concatenate([each.inputs.num_reported for each in scored]),
        jnp.concatenate([each.inputs.reports_processed for each in scored]),
        reported,
    )
    fields, end_fields = places.split_tokens(packed)
    padding = (0, 0), (0, places.width - 1), (0, 0)
    return jnp.concatenate([places.rectangle(fields), jnp.pad(end_fields[:, None], padding)])

"""Verify: hidden states -> Acceptance, for rows that decode and chunks that end their prompt."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.base import Model
from jaxspec.row import SAMPLING_FIELDS
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.prepare import Places, StepInputs
from jaxspec.runner.tables import step_tokens
from jaxspec.sampler import Sampler
from jaxspec.sampling import (
    NO_TOKEN,
    Acceptance,
    SamplingInputs,
    Verifier,
    draw,
    forbidden_ids,
)
from jaxspec.sampling.tables import SamplingTables


def sampling_inputs(rows: BatchState) -> SamplingInputs:
    """How each row's tokens are drawn."""
    names = [field.name for field in SAMPLING_FIELDS]
    return SamplingInputs({name: getattr(rows, name) for name in names})


def _with_tables(inputs: StepInputs, tables: SamplingTables) -> tuple[SamplingInputs, ...]:
    """How tokens are drawn in the rectangle and at chunk ends, each by its tables and prefix."""
    parts = inputs.places.split_rows(sampling_inputs(inputs.active))
    if tables.is_empty:
        return parts
    tokens = step_tokens(inputs)  # the tables have those of chunks
    before = tokens, jnp.zeros((parts[1].seed.shape[0], 0), jnp.int32)
    return tuple(
        SamplingInputs(
            part.columns | {"slot": rows.slot, "num_computed": rows.num_computed}, tables, tokens
        )
        for part, rows, tokens in zip(
            parts, inputs.places.split_rows(inputs.active), before, strict=True
        )
    )


def verify(
    model: Model,
    hidden: Float[Array, "scored hidden"],
    inputs: StepInputs,
    draft_logits: Float[Array, "slots drafts vocab"] | None,
    verifier: Verifier,
    sampler: Sampler,
    tables: SamplingTables = SamplingTables(),  # noqa: B008  frozen, and without arrays
) -> tuple[Acceptance, Float[Array, "scored vocab"] | None]:
    """The drafts of each active row that stand, and the token after them; and the target's logits.

    `hidden` is the trunk's output at `inputs.logits_indices`, and `tables` have the step's chunks
    (`with_chunks`). The end of a chunk is a row without drafts: it takes the target's token, as
    plain decoding does. Rows that produce no token in this step (`inputs.produces_token`) get one
    all the same, which `truncate_at_stop` drops.

    The logits (float32) are the model's own at each scored token, or None where the `sampler` makes
    none.
    """
    places = inputs.places
    decode, ends = _with_tables(inputs, tables)
    first, end_positions = places.split_rows(inputs.first_position)
    offset = jnp.arange(places.width)[None, :]
    positions = first[:, None] + offset
    logits = model.logits(hidden) if sampler.makes_logits else None
    tokens, end_tokens = _target_tokens(
        model,
        hidden,
        logits,
        places,
        _Scored(decode.repeat(places.width), positions.reshape(-1)),
        _Scored(ends, end_positions),
        sampler,
    )
    # Nothing behind a row's last draft may stand, whatever lies there.
    num_drafts, _ = places.split_rows(inputs.num_draft_tokens)
    slots, _ = places.split_rows(inputs.active.slot)
    accepted = verifier(
        places.rectangle(tokens),
        None if logits is None else places.rectangle(places.split_tokens(logits)[0]),
        jnp.where(offset[:, 1:] <= num_drafts[:, None], inputs.drafts, NO_TOKEN),
        None if draft_logits is None else draft_logits[slots, : places.width - 1],
        decode,
        positions,
        sampler=sampler,
    )
    padding = (0, 0), (0, places.width - 1)
    emitted_at_ends = jnp.pad(end_tokens[:, None], padding, constant_values=NO_TOKEN)
    acceptance = Acceptance(
        tokens=jnp.concatenate([accepted.tokens, emitted_at_ends]),
        num_accepted=jnp.pad(accepted.num_accepted, (0, len(end_tokens))),
    )
    return acceptance, logits


class _Scored(NamedTuple):
    """Scored tokens: how the target's own token is drawn at each, and its index in its request."""

    inputs: SamplingInputs
    positions: Int[Array, " n"]


def _target_tokens(
    model: Model,
    hidden: Float[Array, "scored hidden"],
    logits: Float[Array, "scored vocab"] | None,
    places: Places,
    decode: _Scored,
    ends: _Scored,
    sampler: Sampler,
) -> tuple[Int[Array, " verified"], Int[Array, " ends"]]:
    """The tokens (int32) of plain decoding, in the rectangle and at chunk ends."""
    if logits is None:
        forbidden = jnp.concatenate([forbidden_ids(*decode), forbidden_ids(*ends)])
        return places.split_tokens(model.greedy_tokens(hidden, forbidden))
    verified, end_logits = places.split_tokens(logits)
    # Two draws: rejection sampling reads no token of the rectangle, and XLA then drops that draw.
    tokens = draw(verified, *decode, sampler=sampler)
    return tokens, draw(end_logits, *ends, sampler=sampler)

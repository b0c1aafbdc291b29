"""Update: compute the next batch state from the acceptance.

Counts are kept on the device only; the host reads them from step outputs.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache import StatePolicy
from jaxspec.requests.request import Finish
from jaxspec.runner.batch_state import BatchState
from jaxspec.sampling import NO_TOKEN, Acceptance


def truncate_at_stop(
    acceptance: Acceptance,
    rows: BatchState,
    first_index: Int[Array, " rows"],
    emits: Bool[Array, " rows"],
    stop_ids: Int[Array, "rows stops"] | None = None,
) -> tuple[Acceptance, Int[Array, " rows"]]:
    """Truncate the acceptance after each row's last token, and return it with the new `finish`.

    A row ends at a stop id or at its length limit, whichever comes first, and with an error if the
    verify step has no token for it: NaN logits, or every token forbidden.

    The counts are adjusted. If a stop id is the second of three accepted drafts, two tokens are
    emitted and one draft counts as accepted: the stop id is the row's last token, whose state is
    not computed.

    Args:
        acceptance: Result of `verify`.
        rows: The active rows.
        first_index: Position of each row's first emitted token.
        emits: Rows for which the step emits tokens.
        stop_ids: All stop ids of each row, padded with -1; None means `rows.stop_ids`.
    """
    may_emit = emits & rows.is_live
    tokens = jnp.where(may_emit[:, None], acceptance.tokens, NO_TOKEN)
    place = jnp.arange(tokens.shape[1])[None, :]
    index = first_index[:, None] + place
    stop_ids = rows.stop_ids if stop_ids is None else stop_ids
    stops = (tokens[:, :, None] == stop_ids[:, None, :]) & (tokens != NO_TOKEN)[:, :, None]
    is_stop = jnp.any(stops, axis=2) & (index >= rows.min_len[:, None])
    is_last = index == rows.max_len[:, None] - 1
    ends = is_stop | is_last
    after_end = jnp.cumsum(ends, axis=1) - ends.astype(jnp.int32) > 0
    tokens = jnp.where(after_end, NO_TOKEN, tokens)
    real = tokens != NO_TOKEN
    # The target's token after the accepted drafts is missing. A stop before it takes precedence.
    failed = may_emit & (acceptance.num_emitted <= acceptance.num_accepted)
    finish = jnp.select(
        [jnp.any(is_stop & real, axis=1), jnp.any(is_last & real, axis=1), failed],
        [jnp.int32(Finish.STOP), jnp.int32(Finish.LENGTH), jnp.int32(Finish.ERROR)],
        rows.finish,
    )
    num_emitted = jnp.sum(real, axis=1, dtype=jnp.int32)
    num_accepted = jnp.minimum(acceptance.num_accepted, jnp.maximum(num_emitted - 1, 0))
    return dataclasses.replace(acceptance, tokens=tokens, num_accepted=num_accepted), finish


def update(
    rows: BatchState,
    acceptance: Acceptance,
    finish: Int[Array, " rows"],
    prefill_lens: Int[Array, " seqs"],
    states: StatePolicy,
) -> BatchState:
    """Return the active rows after a step; the last `seqs` of them computed a prompt chunk.

    A verify step makes the state valid for the input token and the accepted drafts, which are as
    many as the emitted tokens. A chunk makes it valid for all its tokens. `states` updates the
    location of the valid recurrent state. A row without computed tokens keeps its fields.
    """
    num_decode = rows.num_rows - prefill_lens.shape[0]
    is_chunk = jnp.arange(rows.num_rows) >= num_decode
    computed_prompt = jnp.pad(prefill_lens, (num_decode, 0))
    num_emitted = acceptance.num_emitted
    gained = jnp.where(is_chunk, computed_prompt, num_emitted)
    newest = jnp.take_along_axis(
        acceptance.tokens, jnp.maximum(num_emitted - 1, 0)[:, None], axis=1
    )[:, 0]
    state_fields = {
        name: jnp.where(gained > 0, value, getattr(rows, name))
        for name, value in states.after(rows, acceptance, is_chunk).items()
    }
    return rows.with_fields(
        num_computed=rows.num_computed + gained,
        last_token=jnp.where(num_emitted > 0, newest, rows.last_token),
        finish=finish,
        **state_fields,
    )

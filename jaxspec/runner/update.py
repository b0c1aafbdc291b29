"""Update: Acceptance -> the next batch state. The device alone counts; the host only reads."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache import StatePolicy
from jaxspec.request import Finish
from jaxspec.runner.batch_state import BatchState
from jaxspec.sampling import NO_TOKEN, Acceptance


def truncate_at_stop(
    acceptance: Acceptance,
    rows: BatchState,
    first_index: Int[Array, " rows"],
    emits: Bool[Array, " rows"],
    stop_ids: Int[Array, "rows stops"] | None = None,
) -> tuple[Acceptance, Int[Array, " rows"]]:
    """The acceptance cut after a row's last token, and its new `finish`.

    `first_index` is the index in its request of the row's first emitted token, `emits` whether the
    step makes tokens for it, and `stop_ids` all that it has; None: those of its fields. A row ends
    at a stop id or at its length limit, whichever comes first; with an error where verification had
    no token to give: NaN logits, or every token forbidden.

    The counts are true afterwards. Where a stop is the second of three drafts that stand, two
    tokens are emitted and one draft is accepted: the stop itself is the row's newest token, which
    nothing has computed.
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
    # The target's own token behind the drafts that stand is missing. A stop before it wins below.
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
    """The active rows after a step; the last `seqs` of them took a chunk of prompt.

    A verify makes the input token and the accepted drafts valid: as many as it emitted. A chunk
    makes all its tokens valid. Where the true state then is, the policy says. A row for which
    nothing was computed keeps every field.
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

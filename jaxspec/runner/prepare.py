"""Prepare: plan and batch state -> the step's tokens, positions and slots, from device counts."""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.models.base import ModelInputs
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.regions import DecodeRegion, PrefillRegion
from jaxspec.runner.batch_state import BatchState


@flax.struct.dataclass
class StepInputs:
    """What one step works on. "active" rows are the decode bucket's, then the prefill region's."""

    active: BatchState  # padding is an empty row
    index: Int[Array, " active"]  # each active row's place in the batch; past its end: padding
    model: ModelInputs
    logit_index: Int[Array, " logits"]  # tokens whose output is scored: all that decode, chunk ends
    num_verified: Int[Array, " active"]  # drafts in the row's verify; 0 in a prefill
    emits: Bool[Array, " active"]  # the step makes at least one token for the row
    emits_at: Int[Array, " active"]  # index in its request of the first of them
    lookahead: Int[Array, " seqs"]  # the prompt token after a chunk; -1: the step makes it
    page_size: int = flax.struct.field(pytree_node=False)


def prepare(
    rows: BatchState,
    page_tables: Int[Array, "slots pages"],
    plan: dict[str, Any],
    page_size: int,
    num_decode_rows: int,
) -> StepInputs:
    """This step's inputs. `rows` are already remapped; see `jaxspec.plan.plan_layout` for `plan`.

    The host says which rows decode and which prompt chunks come along. Where a row stands, how many
    drafts it has and which state is its true one, only the device knows.
    """
    num_rows, num_seqs = rows.num_rows, plan["prefill_lens"].shape[0]
    decode_row, seq = jnp.arange(num_decode_rows), jnp.arange(num_seqs)
    decode_index = jnp.where(decode_row < plan["num_decode"], decode_row, num_rows)
    prefill_index = jnp.where(plan["prefill_lens"] > 0, plan["num_decode"] + seq, num_rows)
    index = jnp.concatenate([decode_index, prefill_index])
    active = rows.take(index)

    decode, tokens, positions, live, num_verified = _decode_region(active, num_decode_rows)
    slots = jnp.repeat(decode.slots, tokens.shape[1])
    parts = [(tokens.reshape(-1), positions.reshape(-1), slots, live.reshape(-1))]
    prefill, last = None, jnp.zeros((0,), jnp.int32)
    prefill_rows = active.take(num_decode_rows + seq)
    if plan["prefill_tokens"].shape[0]:
        prefill, flat = _prefill_region(prefill_rows, plan)
        parts.append((plan["prefill_tokens"], *flat))
        last = jnp.maximum(prefill.query_start[1:] - 1, 0) + tokens.size
    tokens_flat, positions_flat, slots_flat, live_flat = map(
        jnp.concatenate, zip(*parts, strict=True)
    )
    ends_prompt = prefill_rows.num_computed + plan["prefill_lens"] >= prefill_rows.prefill_len
    return StepInputs(
        active=active,
        index=index,
        model=ModelInputs(
            tokens=jnp.maximum(tokens_flat, 0),  # a placeholder has to embed as something
            positions=positions_flat,
            kv_slots=slot_mapping(
                page_tables, slots_flat, positions_flat, live_flat, page_size=page_size
            ),
            page_tables=page_tables,
            decode=decode,
            prefill=prefill,
            width=tokens.shape[1],
        ),
        logit_index=jnp.concatenate([jnp.arange(tokens.size), last]),
        num_verified=jnp.concatenate([num_verified, jnp.zeros((num_seqs,), jnp.int32)]),
        emits=jnp.concatenate([decode.query_len > 0, (plan["prefill_lens"] > 0) & ends_prompt]),
        emits_at=jnp.concatenate(
            [decode.num_computed + 1, prefill_rows.num_computed + plan["prefill_lens"]]
        ),
        lookahead=plan["lookahead_tokens"],
        page_size=page_size,
    )


def _decode_region(active: BatchState, num_rows: int):
    """The rectangle: each row's last token, then its drafts.

    A draft beyond the request's end is not verified: with c tokens computed and at most m in all,
    draft j would be followed by token c + 2 + j, so j <= m - 3 - c.
    """
    rows = active.take(jnp.arange(num_rows))
    room = jnp.maximum(rows.max_len - 2 - rows.num_computed, 0)
    num_verified = jnp.where(rows.is_live, jnp.minimum(rows.num_drafts, room), 0)
    query_len = jnp.where(rows.is_live, 1 + num_verified, 0)
    tokens = jnp.concatenate([rows.last_token[:, None], rows.drafts], axis=1)
    place = jnp.arange(tokens.shape[1])[None, :]
    # Padding where a row has ended. A column as it is would come to a kernel as a slice, which XLA
    # makes a graph inside the step's graph.
    region = DecodeRegion(
        slots=jnp.where(rows.is_live, rows.slot, 0),
        num_computed=jnp.where(rows.is_live, rows.num_computed, 0),
        query_len=query_len,
        state_offset=rows.state_offset,
        ring_length=rows.ring_length,
    )
    positions = rows.num_computed[:, None] + place
    return region, tokens, positions, place < query_len[:, None], num_verified


def _prefill_region(rows: BatchState, plan: dict[str, Any]):
    """The chunks end to end: region, and (positions, slots, live) of each of its tokens."""
    starts = jnp.cumsum(plan["prefill_lens"], dtype=jnp.int32)
    region = PrefillRegion(
        slots=rows.slot,
        num_computed=rows.num_computed,
        query_start=jnp.pad(starts, (1, 0)),
        state_offset=rows.state_offset,
    )
    token = jnp.arange(plan["prefill_tokens"].shape[0])
    seq = jnp.sum(token[:, None] >= starts[None, :], axis=1)
    live = token < starts[-1]
    seq = jnp.where(live, seq, 0)
    positions = rows.num_computed[seq] + token - region.query_start[seq]
    return region, (positions, rows.slot[seq], live)

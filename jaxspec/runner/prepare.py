"""Prepare: plan and batch state -> the step's tokens, positions and slots, from device counts."""

from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.models.base import ModelInputs
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.regions import DecodeRegion, PrefillRegion, real_tokens
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
    lens = plan["prefill_lens"]
    num_rows, num_seqs = rows.num_rows, lens.shape[0]
    decode_row, seq = jnp.arange(num_decode_rows), jnp.arange(num_seqs)
    decode_index = jnp.where(decode_row < plan["num_decode"], decode_row, num_rows)
    prefill_index = jnp.where(lens > 0, plan["num_decode"] + seq, num_rows)
    index = jnp.concatenate([decode_index, prefill_index])
    active = rows.take(index)
    prefill_rows = active.take(num_decode_rows + seq)

    decode_rows = active.take(decode_row)
    num_verified = _num_verified(decode_rows)
    decode, columns = _decode_region(decode_rows, num_verified)
    prefill, num_decode_tokens = None, columns.tokens.shape[0]
    logit_index = jnp.arange(num_decode_tokens)
    if plan["prefill_tokens"].shape[0]:
        prefill, chunk_columns = _prefill_region(prefill_rows, plan["prefill_tokens"], lens)
        columns = TokenColumns(*map(_joined, columns, chunk_columns))
        chunk_ends = jnp.maximum(prefill.query_start[1:] - 1, 0) + num_decode_tokens
        logit_index = _joined(logit_index, chunk_ends)
    end = prefill_rows.num_computed + lens
    return StepInputs(
        active=active,
        index=index,
        model=ModelInputs(
            tokens=jnp.maximum(columns.tokens, 0),  # a placeholder has to embed as something
            positions=columns.positions,
            kv_slots=slot_mapping(
                page_tables, columns.slots, columns.positions, columns.live, page_size=page_size
            ),
            page_tables=page_tables,
            decode=decode,
            prefill=prefill,
            width=num_decode_tokens // num_decode_rows,
        ),
        logit_index=logit_index,
        num_verified=_joined(num_verified, jnp.zeros((num_seqs,), jnp.int32)),
        emits=_joined(decode.query_len > 0, (lens > 0) & (end >= prefill_rows.prefill_len)),
        emits_at=_joined(decode.num_computed + 1, end),
        lookahead=plan["lookahead_tokens"],
        page_size=page_size,
    )


class TokenColumns(NamedTuple):
    """Tokens of a region, each with where it stands; padding may hold anything but is not live."""

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]  # index in its request
    slots: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]


def _joined(decode: Array, prefill: Array) -> Array:
    return jnp.concatenate([decode, prefill])


def _num_verified(rows: BatchState) -> Int[Array, " rows"]:
    """How many of its drafts each row verifies.

    A draft beyond the request's end is not: with c tokens computed and at most m in all, draft j
    would be followed by token c + 2 + j, so j <= m - 3 - c.
    """
    room = jnp.maximum(rows.max_len - 2 - rows.num_computed, 0)
    return jnp.where(rows.is_live, jnp.minimum(rows.num_drafts, room), 0)


def _decode_region(
    rows: BatchState, num_verified: Int[Array, " rows"]
) -> tuple[DecodeRegion, TokenColumns]:
    """The rectangle: each row's last token, then its drafts."""
    # A `where`, not the bare column: XLA would hand a kernel a slice of the rows, and a sliced
    # operand becomes a graph nested in the step's CUDA graph.
    region = DecodeRegion(
        slots=jnp.where(rows.is_live, rows.slot, 0),
        num_computed=jnp.where(rows.is_live, rows.num_computed, 0),
        query_len=jnp.where(rows.is_live, 1 + num_verified, 0),
        state_offset=rows.state_offset,
        ring_length=rows.ring_length,
    )
    tokens = jnp.concatenate([rows.last_token[:, None], rows.drafts], axis=1)
    width = tokens.shape[1]
    positions = rows.num_computed[:, None] + jnp.arange(width)[None, :]
    columns = TokenColumns(
        tokens=tokens.reshape(-1),
        positions=positions.reshape(-1),
        slots=jnp.repeat(region.slots, width),
        live=real_tokens(region.query_len, width).reshape(-1),
    )
    return region, columns


def _prefill_region(
    rows: BatchState, tokens: Int[Array, " tokens"], lens: Int[Array, " seqs"]
) -> tuple[PrefillRegion, TokenColumns]:
    """The chunks end to end; those of `rows` have `lens` tokens."""
    starts = jnp.cumsum(lens, dtype=jnp.int32)
    region = PrefillRegion(
        slots=rows.slot,
        num_computed=rows.num_computed,
        query_start=jnp.pad(starts, (1, 0)),
        state_offset=rows.state_offset,
    )
    token = jnp.arange(tokens.shape[0])
    seq = jnp.sum(token[:, None] >= starts[None, :], axis=1)
    live = token < starts[-1]
    seq = jnp.where(live, seq, 0)
    positions = rows.num_computed[seq] + token - region.query_start[seq]
    return region, TokenColumns(tokens, positions, rows.slot[seq], live)

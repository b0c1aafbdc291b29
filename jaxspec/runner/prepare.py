"""Prepare: compute a step's tokens, positions and KV slots from the plan and the batch state."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.models.base import ModelInputs
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.plan.plan import Program
from jaxspec.regions import DecodeRegion, PrefillRegion, owner_of
from jaxspec.runner.batch_state import BatchState
from jaxspec.runner.device_plan import DevicePlan


class Places(NamedTuple):
    """Order of a step's rows and scored tokens: first the decode rectangle, then the chunks.

    For `num_rows` = 2, `width` = 3 and one prompt chunk, whose last token is scored:

        active rows      a b | c
        scored tokens    a a a b b b | c
    """

    num_rows: int  # rows of the decode rectangle
    width: int  # tokens per row, 1 + K

    def split_rows(self, rows: Any) -> tuple[Any, Any]:
        """Split an array or pytree with one entry per active row into decode rows and chunks."""
        parts = slice(self.num_rows), slice(self.num_rows, None)
        first, last = (jax.tree.map(lambda x, part=part: x[part], rows) for part in parts)
        return first, last

    def split_tokens(self, tokens: Array) -> tuple[Array, Array]:
        """Split an array with one entry per scored token into the rectangle's and the chunks'."""
        first, last = jnp.split(tokens, [self.num_rows * self.width])
        return first, last

    def rectangle(self, tokens: Array) -> Array:
        """Reshape `[num_rows * width, ...]` to `[num_rows, width, ...]`."""
        return tokens.reshape(self.num_rows, self.width, *tokens.shape[1:])


@flax.struct.dataclass
class StepInputs:
    """Inputs of a step. Its active rows are those of the rectangle, then those of the chunks."""

    active: BatchState  # padding is an empty row
    index: Int[Array, " active"]  # index of each active row in the batch; past its end if padding
    model: ModelInputs
    logits_indices: Int[Array, " scored"]  # scored tokens: all of the rectangle, and chunk ends
    drafts: Int[Array, "rows drafts"]  # drafts of the decode rows
    num_draft_tokens: Int[Array, " active"]  # number of drafts to verify; 0 in a prefill
    produces_token: Bool[Array, " active"]  # the step emits at least one token for the row
    first_position: Int[Array, " active"]  # position of the first emitted token
    next_prefill_token: Int[Array, " seqs"]  # prompt token after the chunk; -1 after the last one
    page_size: int = flax.struct.field(pytree_node=False)

    @property
    def places(self) -> Places:
        return Places(self.model.decode.slots.shape[0], self.model.width)


class _TokenColumns(NamedTuple):
    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    slots: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]  # False for padding


def prepare(
    rows: BatchState,
    page_tables: Int[Array, "slots pages"],
    plan: DevicePlan,
    page_size: int,
    program: Program,
) -> StepInputs:
    """Return the inputs of a step; `rows` are already remapped.

    The plan selects the rows that decode and the prompt chunks. Positions, numbers of drafts and
    valid states are only in the device's rows.
    """
    num_rows, num_seqs = rows.num_rows, plan.prefill_lens.shape[0]
    num_decode_rows = program.decode_rows
    decode_row, seq = jnp.arange(num_decode_rows), jnp.arange(num_seqs)
    decode_index = jnp.where(decode_row < plan.num_decode, decode_row, num_rows)
    prefill_index = jnp.where(plan.prefill_lens > 0, plan.num_decode + seq, num_rows)
    index = jnp.concatenate([decode_index, prefill_index])
    active = rows.take(index)
    decode_rows, prefill_rows = active.take(decode_row), active.take(num_decode_rows + seq)

    drafts = decode_rows.drafts[:, : program.num_drafts]
    num_drafts = _num_draft_tokens(decode_rows, program.num_drafts)
    decode, columns = _decode_region(decode_rows, drafts, num_drafts)
    num_verified = columns.tokens.size
    prefill, chunk_ends = None, jnp.zeros((0,), jnp.int32)
    if plan.prefill_tokens.shape[0]:
        prefill, chunks = _prefill_region(prefill_rows, plan)
        columns = _TokenColumns(*map(jnp.concatenate, zip(columns, chunks, strict=True)))
        chunk_ends = jnp.maximum(prefill.query_start[1:] - 1, 0) + num_verified
    computed = prefill_rows.num_computed + plan.prefill_lens
    ends_prompt = (plan.prefill_lens > 0) & (computed >= prefill_rows.prefill_len)
    return StepInputs(
        active=active,
        index=index,
        model=ModelInputs(
            tokens=jnp.maximum(columns.tokens, 0),  # a placeholder (-1) is embedded, too
            positions=columns.positions,
            kv_slots=slot_mapping(
                page_tables, columns.slots, columns.positions, columns.live, page_size=page_size
            ),
            live=columns.live,
            page_tables=page_tables,
            decode=decode,
            prefill=prefill,
            width=1 + program.num_drafts,
        ),
        logits_indices=jnp.concatenate([jnp.arange(num_verified), chunk_ends]),
        drafts=drafts,
        num_draft_tokens=jnp.concatenate([num_drafts, jnp.zeros((num_seqs,), jnp.int32)]),
        produces_token=jnp.concatenate([decode.query_len > 0, ends_prompt]),
        first_position=jnp.concatenate([decode.num_computed + 1, computed]),
        next_prefill_token=plan.next_prefill_tokens,
        page_size=page_size,
    )


def _num_draft_tokens(rows: BatchState, num_drafts: int) -> Int[Array, " rows"]:
    """Return the number of drafts to verify in each row, at most `num_drafts`; 0 if finished.

    Drafts that could not be emitted are skipped: with c tokens computed and at most m in all, token
    c + 2 + j follows draft j, so j <= m - 3 - c.
    """
    room = jnp.maximum(rows.max_len - 2 - rows.num_computed, 0)
    most = jnp.minimum(room, jnp.minimum(rows.max_drafts, num_drafts))
    return jnp.where(rows.is_live, jnp.minimum(rows.num_drafts, most), 0)


def _decode_region(
    rows: BatchState, drafts: Int[Array, "rows drafts"], num_drafts: Int[Array, " rows"]
) -> tuple[DecodeRegion, _TokenColumns]:
    """Return the decode rectangle: the last token of each row, then its `num_drafts` drafts."""
    query_len = jnp.where(rows.is_live, 1 + num_drafts, 0)
    tokens = jnp.concatenate([rows.last_token[:, None], drafts], axis=1)
    offset = jnp.arange(tokens.shape[1])[None, :]
    # A finished row is padding. `where` also keeps the kernels' operands from being plain slices of
    # the rows, which would become a CUDA graph inside the step's graph.
    region = DecodeRegion(
        slots=jnp.where(rows.is_live, rows.slot, 0),
        num_computed=jnp.where(rows.is_live, rows.num_computed, 0),
        query_len=query_len,
        state_offset=rows.state_offset,
        ring_length=rows.ring_length,
    )
    return region, _TokenColumns(
        tokens=tokens.reshape(-1),
        positions=(rows.num_computed[:, None] + offset).reshape(-1),
        slots=jnp.repeat(region.slots, tokens.shape[1]),
        live=(offset < query_len[:, None]).reshape(-1),
    )


def _prefill_region(rows: BatchState, plan: DevicePlan) -> tuple[PrefillRegion, _TokenColumns]:
    starts = jnp.cumsum(plan.prefill_lens, dtype=jnp.int32)
    region = PrefillRegion(
        slots=rows.slot,
        num_computed=rows.num_computed,
        query_start=jnp.pad(starts, (1, 0)),
        state_offset=rows.state_offset,
    )
    token = jnp.arange(plan.prefill_tokens.shape[0], dtype=jnp.int32)
    seq = owner_of(token, starts)
    live = token < starts[-1]
    seq = jnp.where(live, seq, 0)
    positions = rows.num_computed[seq] + token - region.query_start[seq]
    return region, _TokenColumns(plan.prefill_tokens, positions, rows.slot[seq], live)

"""StepPlan: all that the scheduler tells the device about one step, as one packed int32 array.

Also the layout of a row of the batch state, which both sides must agree on: the host packs new
rows, the device unpacks them. No JAX here; `PackedLayout.unpack` slices NumPy and JAX arrays alike.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config import Buckets, Variant

MAX_STOP_IDS = 16  # stop token ids a row has room for


class PackedLayout:
    """Named fields laid end to end along the last axis of one array."""

    def __init__(self, **shapes: tuple[int, ...]):
        """Lay out `shapes` (field name -> shape; `()` for a scalar) in the order given."""
        self.shapes = shapes
        self.slices: dict[str, slice] = {}
        start = 0
        for name, shape in shapes.items():
            self.slices[name] = slice(start, start + math.prod(shape))
            start += math.prod(shape)
        self.size = start

    def unpack(self, array: Any) -> dict[str, Any]:
        """Every field of `array [..., size]` by name, as views of shape `[..., *shape]`."""
        lead = array.shape[:-1]
        return {
            name: array[..., self.slices[name]].reshape((*lead, *shape))
            for name, shape in self.shapes.items()
        }


@functools.cache
def batch_row_layout(num_drafts: int) -> PackedLayout:
    """The int32 fields of a row; `jaxspec.runner.batch_state.BatchState` says what they mean.

    `temperature` and `top_p` are float32, kept as their bits.
    """
    return PackedLayout(
        slot=(),
        prefill_len=(),
        min_len=(),
        max_len=(),
        num_computed=(),
        last_token=(),
        state_offset=(),
        ring_length=(),
        finish=(),
        seed=(),
        temperature=(),
        top_k=(),
        top_p=(),
        proposer_key=(),
        stop_ids=(MAX_STOP_IDS,),
        num_drafts=(),
        drafts=(num_drafts,),
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """The static shape of one compiled step."""

    decode_rows: int  # rows of the decode rectangle
    prefill_tokens: int  # tokens of the flat prefill region; 0: the hot program has none
    variant: Variant  # what its sampling can do
    num_steps: int = 1  # decode steps, one after the other; more than 1 only without a prompt


# Places rows and copies slots and pages, and computes nothing: a hot program has no room for moves,
# because the copies would cost as much without moves as with all there is room for.
MOVES = Program(decode_rows=0, prefill_tokens=0, variant="greedy", num_steps=0)


@functools.cache
def plan_layout(program: Program, buckets: Buckets) -> PackedLayout:
    """Where each field of a `StepPlan` for `program` lies in its packed array."""
    rows, drafts, page_size = buckets.max_num_seqs, buckets.num_drafts, buckets.page_size
    seqs = buckets.prefill_seqs(program.prefill_tokens)
    new = buckets.max_new_rows
    # A row's reserve grows by at most 1 + K positions a step, those verified, and the 2K of the
    # draft head; a chunk of prompt adds its own length.
    growth = 1 + -(-(program.num_steps * (1 + drafts) + 2 * drafts) // page_size)
    appends = (program.decode_rows + seqs) * growth + seqs + program.prefill_tokens // page_size
    # A target gets its whole page table: whoever starts on many pages at once, as a hit of a prefix
    # cache would, needs no more room. Only the number of targets would have to grow.
    moves = new if program == MOVES else 0
    return PackedLayout(
        prev_positions=(rows,),
        num_decode=(),
        new_row_index=(new,),
        new_rows=(new, batch_row_layout(drafts).size),
        append_slots=(appends,),
        append_indices=(appends,),
        append_pages=(appends,),
        prefill_tokens=(program.prefill_tokens,),
        prefill_lens=(seqs,),
        lookahead_tokens=(seqs,),
        source_slots=(moves,),
        target_slots=(moves,),
        source_pages=(moves,),
        target_pages=(moves,),
        target_tables=(moves, buckets.pages_per_seq),
    )


@functools.cache
def output_layout(num_drafts: int) -> PackedLayout:
    """One row of a step's packed output."""
    return PackedLayout(tokens=(1 + num_drafts,), num_drafts=(), num_accepted=(), finish=())


class RowOutput(NamedTuple):
    """What the steps of one dispatch gave one row together."""

    tokens: tuple[int, ...]  # emitted ids
    finish: int  # a `Finish`
    num_verifies: int  # that had drafts
    num_drafts: int  # verified
    accepted: list[int]  # [K]; in how many verifies the first draft stood, the first two, ...


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What the steps of one dispatch gave, on the host.

    Its rows are those of the decode bucket, then the prefill region's.
    """

    tokens: np.ndarray  # int32 [steps, rows, 1 + drafts]; emitted ids, then -1
    num_drafts: np.ndarray  # int32 [steps, rows]; drafts verified
    num_accepted: np.ndarray  # int32 [steps, rows]; of those, how many stand
    finish: np.ndarray  # int32 [steps, rows]; a `Finish`, which stays once it is set

    @staticmethod
    def unpack(packed: np.ndarray) -> "StepOutput":
        """From the array `[steps, rows, output_layout(K).size]` the device wrote."""
        return StepOutput(**output_layout(packed.shape[-1] - output_layout(0).size).unpack(packed))

    def by_row(self) -> list[RowOutput]:
        """The steps joined, row by row.

        Counted by NumPy for all rows at once: meanwhile the host cannot plan the next step.
        """
        num_rows, num_drafts = self.tokens.shape[1], self.tokens.shape[2] - 1
        tokens = self.tokens.transpose(1, 0, 2).reshape(num_rows, -1)
        emitted = tokens != -1
        ends = emitted.sum(axis=1).cumsum().tolist()
        flat = tuple(tokens[emitted].tolist())
        stood = self.num_accepted[:, :, None] > np.arange(num_drafts)
        fields = (
            [flat[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)],
            self.finish[-1].tolist(),
            np.count_nonzero(self.num_drafts, axis=0).tolist(),
            self.num_drafts.sum(axis=0).tolist(),
            stood.sum(axis=0).tolist(),
        )
        return [RowOutput(*row) for row in zip(*fields, strict=True)]


class Fork(NamedTuple):
    """A request that starts where another one's prompt ends, on a copy of its state."""

    source_slot: int
    target_slot: int
    source_page: int  # the partly filled last page; 0: the prompt fills its pages exactly
    target_page: int
    target_table: tuple[int, ...]  # all pages of the new request, the shared ones first


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One dispatch as the device needs it: what it says holds for all its steps.

    `packed` is fresh for every dispatch and never written again.
    """

    program: Program
    packed: np.ndarray  # int32, `plan_layout(program, buckets)`


def pack_plan(program: Program, buckets: Buckets, values: dict[str, Any]) -> np.ndarray:
    """Lay `values` out for `program`; a list shorter than its field is padded with "none".

    Raises:
        ValueError: a list is longer than its field.
    """
    layout = plan_layout(program, buckets)
    packed = np.zeros(layout.size, np.int32)
    fields = layout.unpack(packed)
    fields["prev_positions"][:] = -1
    fields["new_row_index"][:] = -1
    for name, value in values.items():
        value = np.asarray(value)
        if value.ndim == 0:
            fields[name][...] = value
        elif len(value) > len(fields[name]):
            raise ValueError(
                f"A plan for {program} has room for {fields[name].shape} in {name}, "
                f"{len(value)} came: the scheduler must plan less."
            )
        elif len(value):
            fields[name][: len(value)] = value
    return packed

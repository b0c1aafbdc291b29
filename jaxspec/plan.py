"""What passes between host and device in each step: the packed plan one way, the output the other.

No JAX here: the layouts (`jaxspec.layout`) read NumPy and JAX arrays alike. A plan's new rows are
packed as `jaxspec.row` says.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxspec.config import StepShapes
from jaxspec.layout import Field, PackedLayout
from jaxspec.piece_plan import Piece, Read, Write, pack_piece, piece_layout
from jaxspec.row import row_layout
from jaxspec.sampler import BIAS, GREEDY, PENALTIES, Sampler
from jaxspec.table_plan import table_layout


@dataclasses.dataclass(frozen=True)
class Program:
    """The static shape of one compiled step.

    One without prompt tokens has none to report on, so its sampler loses `PROMPT_LOGPROBS`.
    """

    decode_rows: int  # rows of the decode rectangle
    prefill_tokens: int  # tokens of the flat prefill region; 0: the hot program has none
    sampler: Sampler  # what its sampling can do
    num_steps: int = 1  # decode steps, one after the other; more than 1 only without a prompt
    num_drafts: int = 0  # of a row, verified in a step and then made anew: K or less
    checkpoint: Literal[  # what it does with one, or with a piece of what is kept
        "none", "export", "restore", "read", "write", "read_state", "write_state"
    ] = "none"

    def __post_init__(self) -> None:
        """Drop what changes nothing: equal programs are compiled once."""
        if not self.prefill_tokens:
            object.__setattr__(self, "sampler", self.sampler.of_decoding)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(decode rows, prefill tokens, drafts), as in `StepShapes.compiled`."""
        return self.decode_rows, self.prefill_tokens, self.num_drafts

    @property
    def is_moves(self) -> bool:
        """Whether it places rows, and copies slots and pages, as `MOVES`."""
        return self.num_steps == 0 and self not in (TABLES, EXPORT, *PIECES)

    @property
    def is_of_state(self) -> bool:
        """Whether its piece is a checkpoint's; for one of `PIECES`."""
        return self in (READ_STATE, WRITE_STATE)


_NOTHING = Program(decode_rows=0, prefill_tokens=0, sampler=GREEDY, num_steps=0)
# Places rows, copies slots, their counts of tokens and pages, and computes nothing: a hot program
# has no room for moves, because the copies would cost as much without moves as with all there is
# room for.
MOVES = dataclasses.replace(_NOTHING, sampler=Sampler.of(PENALTIES))
# Writes the tables of one slot, and touches nothing else.
TABLES = dataclasses.replace(_NOTHING, sampler=Sampler.of(BIAS))
# Keeps the state of one row for requests to come, and touches no row.
EXPORT = dataclasses.replace(_NOTHING, checkpoint="export")
# Places rows as `MOVES` does. Its one source is a checkpoint, if the model keeps states at all.
RESTORE = dataclasses.replace(_NOTHING, checkpoint="restore")

# Fill a piece with pages, or with a kept state, in the host's memory; and put one back.
READ = dataclasses.replace(_NOTHING, checkpoint="read")
WRITE = dataclasses.replace(_NOTHING, checkpoint="write")
READ_STATE = dataclasses.replace(_NOTHING, checkpoint="read_state")
WRITE_STATE = dataclasses.replace(_NOTHING, checkpoint="write_state")

PIECES = READ, WRITE, READ_STATE, WRITE_STATE
WITHOUT_STEPS = MOVES, TABLES, EXPORT, RESTORE, *PIECES


def plan_layout(program: Program, shapes: StepShapes) -> PackedLayout:
    """Where each field of a `StepPlan` for `program` lies in its packed array."""
    if program in PIECES:  # their size is none of a step's
        return piece_layout(1 if program.is_of_state else shapes.piece_pages)
    return _plan_layout(program, shapes)


@functools.cache
def _plan_layout(program: Program, shapes: StepShapes) -> PackedLayout:
    if program == TABLES:
        return table_layout(shapes.vocab_size)
    if program == EXPORT:
        return _EXPORT_LAYOUT
    rows, drafts, page_size = shapes.max_num_seqs, shapes.num_drafts, shapes.page_size
    seqs = shapes.prefill_seqs(program.prefill_tokens)
    new = shapes.max_new_rows
    # A row's reserve grows by at most 1 + K positions a step, those verified, and the 2K of the
    # draft head; a chunk of prompt adds its own length.
    growth = 1 + -(-(program.num_steps * (1 + drafts) + 2 * drafts) // page_size)
    appends = (program.decode_rows + seqs) * growth + seqs + program.prefill_tokens // page_size
    # A target gets its whole page table, so it may start on any number of pages.
    moves = new if program.is_moves else 0
    if program == RESTORE:  # rarely more than one, and room costs as much as copies
        moves = 1
    tables = moves, shapes.pages_per_seq
    chunks = (program.prefill_tokens,)
    has_paths = shapes.path_length > 0 and not program.is_moves
    return PackedLayout(
        [
            Field("prev_positions", "Each row's index in the last plan; -1: new.", shape=(rows,)),
            Field("num_decode", "Rows that decode, the first ones."),
            Field("new_row_index", "Rows that enter; -1: none.", shape=(new,)),
            Field("new_rows", "Their fields.", shape=(new, row_layout(drafts).size)),
            Field("append_slots", "Slots that are given a page; 0: none.", shape=(appends,)),
            Field("append_indices", "Its index in the slot's page table.", shape=(appends,)),
            Field("append_pages", "The page.", shape=(appends,)),
            Field("prefill_tokens", "Chunks of prompts, end to end.", shape=chunks),
            Field("prefill_lens", "Tokens of each chunk; 0: none.", shape=(seqs,)),
            Field("next_prefill_tokens", "What follows it; -1: the step's own.", shape=(seqs,)),
            Field("source_slots", "Slots that are copied.", shape=(moves,)),
            Field("target_slots", "Where to; 0: nowhere.", shape=(moves,)),
            Field("source_pages", "Pages that are copied.", shape=(moves,)),
            Field("target_pages", "Where to; 0: nowhere.", shape=(moves,)),
            Field("target_tables", "All pages of each target slot.", shape=tables),
            *(_path_fields(rows, shapes.path_length) if has_paths else ()),
        ]
    )


_EXPORT_LAYOUT = PackedLayout(
    [
        Field("row", "The row, by its index in the last plan."),
        Field("checkpoint", "The slot of checkpoints that gets its state; 0: none."),
        Field("source_page", "A page that is copied."),
        Field("target_page", "Where to; 0: nowhere."),
    ]
)


def _path_fields(rows: int, length: int) -> tuple[Field, ...]:
    """What only engines have whose drafts come from the host (`scheduler.host_drafter`)."""
    return (
        Field("paths", "How each row is expected to go on, then -1.", shape=(rows, length)),
        Field("path_from", "Index in its request of the path's first token.", shape=(rows,)),
        Field("path_match", "Tokens before the path that led to it.", shape=(rows,)),
    )


class RowOutput(NamedTuple):
    """What the steps of one dispatch gave one row together."""

    tokens: tuple[int, ...]  # emitted ids
    draft_positions: tuple[int, ...]  # of each: j, if it was draft j of its verify; 0, the target's
    finish: int  # a `Finish`
    drafted: list[int]  # [K]; how many verifies had a first draft, a second, ...
    accepted: list[int]  # [K]; in how many of them it stood
    num_dropped: int = 0  # drafts that were no ids of the vocabulary


def _column(meaning: str, shape: tuple[int | str, ...] = (), dtype: Any = np.int32) -> Any:
    return dataclasses.field(metadata={"meaning": meaning, "shape": shape, "dtype": dtype})


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What the steps of one dispatch gave, on the host: NumPy arrays `[steps, rows, *shape]`.

    Its rows are the decode rectangle's, then the prefill region's. The packed output of a step has
    the first fields in this order (`output_layout`). What programs report besides comes in arrays
    of its own, rows of `logprobs.LAYOUT`, from the programs whose sampler says so.
    """

    tokens: np.ndarray = _column("Emitted ids, then -1.", ("emits",))
    num_drafts: np.ndarray = _column("Drafts verified.")
    num_accepted: np.ndarray = _column("Drafts that stand.")
    finish: np.ndarray = _column("A `Finish`, which stays once it is set.")
    num_dropped: np.ndarray = _column("Drafts verified that were no ids of the vocabulary.")
    logprobs: np.ndarray | None = None  # int32 [steps, rows, tokens of a verify, LAYOUT.size]
    prompt_logprobs: np.ndarray | None = None  # int32 [steps, prompt tokens, LAYOUT.size]

    @staticmethod
    def unpack(
        packed: np.ndarray,
        layout: PackedLayout,
        logprobs: np.ndarray | None = None,
        prompt_logprobs: np.ndarray | None = None,
    ) -> "StepOutput":
        """The fields of `packed` (int32 `[steps, rows, layout.size]`), as the device wrote it."""
        return StepOutput(
            **layout.unpack(packed), logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )

    def by_row(self) -> list[RowOutput]:
        """The steps joined, row by row.

        A verify emits the drafts that stand, in order, and then one token of the target's. NumPy
        counts for all rows at once: meanwhile the host cannot plan the next step.
        """
        steps, num_rows, width = self.tokens.shape
        tokens = self.tokens.transpose(1, 0, 2).reshape(num_rows, steps * width)
        emitted = tokens != -1
        ends = emitted.sum(axis=1).cumsum().tolist()
        spans = list(map(slice, [0, *ends[:-1]], ends))
        places = np.arange(1, width + 1)
        stood = self.num_accepted[:, :, None] >= places
        positions = (stood * places).transpose(1, 0, 2).reshape(tokens.shape)
        flat = tuple(tokens[emitted].tolist())
        flat_positions = tuple(positions[emitted].tolist())
        fields = (
            [flat[span] for span in spans],
            [flat_positions[span] for span in spans],
            self.finish[-1].tolist(),
            (self.num_drafts[:, :, None] >= places[:-1]).sum(axis=0).tolist(),
            stood[:, :, :-1].sum(axis=0).tolist(),
            self.num_dropped.sum(axis=0).tolist(),
        )
        return list(map(RowOutput._make, zip(*fields, strict=True)))


@functools.cache
def output_layout(num_drafts: int) -> PackedLayout:
    """Where each field of a `StepOutput` lies in a row of the packed output."""
    columns = [field for field in dataclasses.fields(StepOutput) if field.metadata]
    return PackedLayout((Field(each.name, **each.metadata) for each in columns), num_drafts)


class Export(NamedTuple):
    """A state that is kept for requests to come; the fields are those of `EXPORT`'s layout."""

    row: int
    checkpoint: int
    source_page: int = 0  # its partly filled last page, if the row goes on to fill it
    target_page: int = 0


class Fork(NamedTuple):
    """A request that starts behind tokens that were computed, on a copy of their state."""

    source_slot: int  # of another row; in a plan for `RESTORE` of a checkpoint
    target_slot: int
    source_page: int  # the partly filled last page; 0: the prompt fills its pages exactly
    target_page: int
    target_table: tuple[int, ...]  # all pages of the new request, the shared ones first


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One dispatch as the device needs it. All its steps follow the same plan.

    `packed` is fresh for every dispatch and never written again.
    """

    program: Program
    packed: np.ndarray  # int32, `plan_layout(program, shapes)`
    before: tuple["StepPlan", ...] = ()  # what must be dispatched in front of it
    piece: Piece | None = None  # that one of `PIECES` fills, or puts back


def pack_export(export: Export) -> StepPlan:
    """The plan that keeps a state."""
    packed = np.zeros(_EXPORT_LAYOUT.size, np.int32)
    fields = _EXPORT_LAYOUT.unpack(packed)
    for name, value in export._asdict().items():
        fields[name][...] = value
    return StepPlan(EXPORT, packed)


def pack_copy(copy: Read | Write, shapes: StepShapes) -> StepPlan:
    """The plan that fills a piece, or puts one back."""
    kinds = (READ, READ_STATE) if isinstance(copy, Read) else (WRITE, WRITE_STATE)
    packed = pack_piece(copy, 1 if copy.piece.is_state else shapes.piece_pages)
    return StepPlan(kinds[copy.piece.is_state], packed, piece=copy.piece)


def pack_plan(program: Program, shapes: StepShapes, values: dict[str, Any]) -> np.ndarray:
    """Lay `values` out for `program`; a list shorter than its field is padded with "none".

    Raises:
        ValueError: a list is longer than its field.
    """
    layout = plan_layout(program, shapes)
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

"""The interface of host and device: step plans to the device, step outputs back, both packed.

Imports no JAX: the layouts (`jaxspec.layout`) read NumPy and JAX arrays alike. `jaxspec.plan.row`
defines the layout of new rows in a plan.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.plan.automaton_plan import automaton_layout
from jaxspec.plan.block_plan import Block, Read, Write, block_layout, pack_block
from jaxspec.plan.mask_plan import mask_layout
from jaxspec.plan.processor_plan import processor_layout
from jaxspec.plan.row import row_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.plan.table_plan import table_layout
from jaxspec.requests.sampling_features import EVERYTHING, SamplingFeatures


@dataclasses.dataclass(frozen=True)
class Program:
    """Static shape of a compiled step.

    A step without prompt tokens has no prompt to report on: `PROMPT_LOGPROBS` is removed from its
    features, so that equal programs are compiled once.
    """

    decode_rows: int  # rows of the decode rectangle
    prefill_tokens: int  # tokens of the flat prefill region; 0 in the program that only decodes
    features: SamplingFeatures
    num_steps: int = 1  # decode steps, one after the other; above 1 only without prompt tokens
    num_drafts: int = 0  # drafts that a row verifies, and that are proposed afterwards; at most K

    def __post_init__(self) -> None:
        if not self.prefill_tokens:
            object.__setattr__(self, "features", self.features.of_decoding)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(decode rows, prefill tokens, drafts), as in `StepShapes.compiled`."""
        return self.decode_rows, self.prefill_tokens, self.num_drafts


@dataclasses.dataclass(frozen=True)
class AfterForwardPass(Program):
    """Second half of a step without prompt tokens, which follows a `ForwardPass` of equal sizes."""


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """First half of a step without prompt tokens: places the rows and runs the model.

    Masks of the host are computed meanwhile, since only the second half reads them.
    """

    decode_rows: int
    num_drafts: int

    @property
    def rest(self) -> AfterForwardPass:
        """The second half; both have the same plan."""
        return AfterForwardPass(self.decode_rows, 0, EVERYTHING, 1, self.num_drafts)


@dataclasses.dataclass(frozen=True)
class MoveRows:
    """Program that places rows, copies state slots and pages, and computes nothing.

    Steps have no room for copies: in XLA a copy of no slots moves as many bytes as one of all the
    slots that there is room for.
    """

    restores: bool = False  # the source of its one copy is a cached state, if the model has states


@dataclasses.dataclass(frozen=True)
class WriteTables:
    """Program that writes the sampling tables of one state slot."""


@dataclasses.dataclass(frozen=True)
class WriteMasks:
    """Program that writes the masks of some state slots, one for each position of a verify."""


@dataclasses.dataclass(frozen=True)
class WriteAutomaton:
    """Program that writes states of an automaton."""


@dataclasses.dataclass(frozen=True)
class WriteProcessorArgs:
    """Program that writes the arguments of logits processors of one state slot."""


@dataclasses.dataclass(frozen=True)
class ExportState:
    """Program that copies the state of one row to a cached state."""


@dataclasses.dataclass(frozen=True)
class CopyBlock:
    """Program that copies a block to the host ("read") or back into the pools ("write")."""

    direction: Literal["read", "write"]
    of_state: bool  # the block holds a cached state and one page; else pages alone


WriteSampling = WriteTables | WriteMasks | WriteAutomaton | WriteProcessorArgs
"""Programs that write parts of the sampling tables."""
AnyProgram = Program | ForwardPass | MoveRows | WriteSampling | ExportState | CopyBlock
"""A step, half a step, or work between two steps."""

PlacesRows = Program | ForwardPass | MoveRows
"""Programs whose plan places the rows of the batch."""

MOVES, RESTORE = MoveRows(), MoveRows(restores=True)
TABLES, MASKS, AUTOMATON, EXPORT = WriteTables(), WriteMasks(), WriteAutomaton(), ExportState()
PROCESSOR_ARGS = WriteProcessorArgs()
READ, READ_STATE = CopyBlock("read", of_state=False), CopyBlock("read", of_state=True)
WRITE, WRITE_STATE = CopyBlock("write", of_state=False), CopyBlock("write", of_state=True)
BLOCK_COPIES = READ, WRITE, READ_STATE, WRITE_STATE
WRITES = TABLES, MASKS, AUTOMATON, PROCESSOR_ARGS
WITHOUT_STEPS = MOVES, *WRITES, EXPORT, RESTORE, *BLOCK_COPIES


def entry_of(program: AnyProgram) -> dict[str, Any]:
    """Return a program as JSON values."""
    return {"kind": type(program).__name__, **dataclasses.asdict(program)}


def program_of(entry: dict[str, Any]) -> AnyProgram:
    """Return the program of `entry_of`.

    Raises:
        ValueError: there is no such program.
        KeyError, TypeError, IndexError: a value is missing, or has another type.
    """
    kinds = {kind.__name__: kind for kind in (Program, AfterForwardPass, ForwardPass)}
    if entry["kind"] not in kinds:
        for program in WITHOUT_STEPS:
            if entry == entry_of(program):
                return program
        raise ValueError(f"it has the program {entry!r:.100}")
    given = {name: value for name, value in entry.items() if name != "kind"}
    if any(type(size) is not int for name, size in given.items() if name != "features"):
        raise ValueError(f"it has the program {entry!r:.100}")
    if "features" in given:
        given["features"] = SamplingFeatures.of(*given["features"][0])
    return kinds[entry["kind"]](**given)


def plan_layout(program: AnyProgram, shapes: StepShapes) -> PackedLayout:
    """Return the layout of the packed `StepPlan` of `program`."""
    match program:
        case ForwardPass():
            return _step_layout(program.rest, shapes)
        case Program():
            return _step_layout(program, shapes)
        case MoveRows():
            # More than one restore is rare, and unused room costs as much as copies.
            moves = 1 if program.restores else shapes.max_new_rows
            return _row_layout(shapes, moves=moves)
        case WriteTables():
            return table_layout(shapes.vocab_size, shapes.recent_tokens)
        case WriteMasks():
            return mask_layout(shapes)
        case WriteAutomaton():
            return automaton_layout(shapes.vocab_size)
        case WriteProcessorArgs():
            return processor_layout(shapes)
        case ExportState():
            return _EXPORT_LAYOUT
        case CopyBlock():
            return block_layout(1 if program.of_state else shapes.block_pages)


@functools.cache
def _step_layout(program: Program, shapes: StepShapes) -> PackedLayout:
    drafts, page_size = shapes.num_drafts, shapes.page_size
    seqs = shapes.prefill_seqs(program.prefill_tokens)
    # The reserved positions of a row grow by at most 1 + K per step, those verified, and the 2K of
    # the draft head; a prompt chunk adds its length.
    growth = 1 + -(-(program.num_steps * (1 + drafts) + 2 * drafts) // page_size)
    appends = (program.decode_rows + seqs) * growth + seqs + program.prefill_tokens // page_size
    return _row_layout(
        shapes,
        appends=appends,
        prefill_tokens=program.prefill_tokens,
        seqs=seqs,
        path_length=shapes.path_length,
    )


@functools.cache
def _row_layout(
    shapes: StepShapes,
    *,
    moves: int = 0,
    appends: int = 0,
    prefill_tokens: int = 0,
    seqs: int = 0,
    path_length: int = 0,
) -> PackedLayout:
    rows, new, drafts = shapes.max_num_seqs, shapes.max_new_rows, shapes.num_drafts
    # A target slot gets its whole page table, so a request may start with any number of pages.
    tables = moves, shapes.pages_per_seq
    return PackedLayout(
        [
            Field("prev_positions", "Each row's index in the last plan, or -1.", shape=(rows,)),
            Field("num_decode", "Number of rows that decode; they come first."),
            Field("new_row_index", "Indices of new rows, then -1.", shape=(new,)),
            Field("new_rows", "The new rows (`row_layout`).", shape=(new, row_layout(drafts).size)),
            Field("append_slots", "Slots of appended pages, then 0.", shape=(appends,)),
            Field("append_indices", "Their indices in the page tables.", shape=(appends,)),
            Field("append_pages", "The appended pages.", shape=(appends,)),
            Field("prefill_tokens", "Prompt chunks, concatenated.", shape=(prefill_tokens,)),
            Field("prefill_lens", "Tokens per chunk, then 0.", shape=(seqs,)),
            Field("next_prefill_tokens", "Token after each; -1 at the end.", shape=(seqs,)),
            Field("source_slots", "Slots to copy from.", shape=(moves,)),
            Field("target_slots", "Slots to copy to, then 0.", shape=(moves,)),
            Field("source_pages", "Pages to copy from.", shape=(moves,)),
            Field("target_pages", "Pages to copy to, or 0.", shape=(moves,)),
            Field("target_tables", "Page tables of the target slots.", shape=tables),
            *(_path_fields(rows, path_length) if path_length else ()),
        ]
    )


_EXPORT_LAYOUT = PackedLayout(
    [
        Field("row", "Index of the row in the last plan."),
        Field("checkpoint", "State slot to copy to; 0 means none."),
        Field("source_page", "Page to copy from."),
        Field("target_page", "Page to copy to; 0 means none."),
    ]
)


def _path_fields(rows: int, length: int) -> tuple[Field, ...]:
    return (
        Field("paths", "Predicted tokens of each row, then -1.", shape=(rows, length)),
        Field("path_from", "Index of the first predicted token in the request.", shape=(rows,)),
        Field("path_match", "Number of matching tokens before the path.", shape=(rows,)),
    )


class RowOutput(NamedTuple):
    """Joined results of one row from the steps of one dispatch."""

    tokens: tuple[int, ...]  # emitted ids
    draft_positions: tuple[int, ...]  # per token: j for draft j of its verify, 0 for the target's
    finish: int  # a `Finish`
    drafted: list[int]  # [K]; number of verify steps with a first draft, a second, ...
    accepted: list[int]  # [K]; number of these that accepted it
    num_dropped: int = 0  # drafts outside the vocabulary


def _column(meaning: str, shape: tuple[int | str, ...] = (), dtype: Any = np.int32) -> Any:
    return dataclasses.field(metadata={"meaning": meaning, "shape": shape, "dtype": dtype})


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Results of the steps of one dispatch, on the host: NumPy arrays `[steps, rows, *shape]`.

    The rows of the decode rectangle come first, then those of the prefill region. The packed output
    of a step has the first fields in this order (`output_layout`). Logprobs are separate arrays of
    rows of `logprobs.LAYOUT`, returned only by programs whose sampling features report them.
    """

    tokens: np.ndarray = _column("Emitted ids, then -1.", ("emits",))
    num_drafts: np.ndarray = _column("Drafts verified.")
    num_accepted: np.ndarray = _column("Drafts accepted.")
    finish: np.ndarray = _column("A `Finish`; it stays once set.")
    num_dropped: np.ndarray = _column("Drafts verified that are outside the vocabulary.")
    next_drafts: np.ndarray = _column("Drafts to verify next, then -1.", ("drafts",))
    logprobs: np.ndarray | None = None  # int32 [steps, rows, tokens of a verify, LAYOUT.size]
    prompt_logprobs: np.ndarray | None = None  # int32 [steps, prompt tokens, LAYOUT.size]

    @staticmethod
    def unpack(
        packed: np.ndarray,
        layout: PackedLayout,
        logprobs: np.ndarray | None = None,
        prompt_logprobs: np.ndarray | None = None,
    ) -> "StepOutput":
        """Return the fields of `packed` (int32 `[steps, rows, layout.size]`)."""
        return StepOutput(
            **layout.unpack(packed), logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )

    def by_row(self) -> list[RowOutput]:
        """Join the steps of each row.

        A verify step emits its accepted drafts in order, then one token of the target model. NumPy
        counts all rows at once, because the host cannot plan the next step meanwhile.
        """
        steps, num_rows, width = self.tokens.shape
        tokens = self.tokens.transpose(1, 0, 2).reshape(num_rows, steps * width)
        emitted = tokens != -1
        ends = emitted.sum(axis=1).cumsum().tolist()
        spans = list(map(slice, [0, *ends[:-1]], ends))
        places = np.arange(1, width + 1)
        accepted = self.num_accepted[:, :, None] >= places
        positions = (accepted * places).transpose(1, 0, 2).reshape(tokens.shape)
        flat = tuple(tokens[emitted].tolist())
        flat_positions = tuple(positions[emitted].tolist())
        fields = (
            [flat[span] for span in spans],
            [flat_positions[span] for span in spans],
            self.finish[-1].tolist(),
            (self.num_drafts[:, :, None] >= places[:-1]).sum(axis=0).tolist(),
            accepted[:, :, :-1].sum(axis=0).tolist(),
            self.num_dropped.sum(axis=0).tolist(),
        )
        return list(map(RowOutput._make, zip(*fields, strict=True)))


@functools.cache
def output_layout(num_drafts: int) -> PackedLayout:
    """Return the layout of a row of the packed output, for `num_drafts` drafts."""
    columns = [field for field in dataclasses.fields(StepOutput) if field.metadata]
    return PackedLayout((Field(each.name, **each.metadata) for each in columns), num_drafts)


class StateExport(NamedTuple):
    """A row's state to be cached; the fields are those of the layout of `EXPORT`."""

    row: int
    checkpoint: int  # state slot of the copy
    source_page: int = 0  # the row's partly filled last page, if the row continues in it
    target_page: int = 0


class SlotCopy(NamedTuple):
    """Start of a request at computed tokens: copies of their state and of their last page."""

    source_slot: int  # of another row; in a `RESTORE` plan the slot of a cached state
    target_slot: int
    source_page: int  # the partly filled last page; 0 if there is none
    target_page: int
    target_table: tuple[int, ...]  # all pages of the new request, the shared ones first


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Plan of one dispatch; all its steps use the same plan.

    `packed` is a new array for every dispatch and is never written again.
    """

    program: AnyProgram
    packed: np.ndarray  # int32, `plan_layout(program, shapes)`
    before: tuple["StepPlan", ...] = ()  # plans to dispatch before it, in this order
    block: Block | None = None  # the block that a `CopyBlock` reads into, or writes from

    @property
    def num_steps(self) -> int:
        """Steps of the dispatch; 0 for work between steps, and for the first half of one."""
        return self.program.num_steps if isinstance(self.program, Program) else 0


def pack_export(export: StateExport) -> StepPlan:
    """Return the plan that copies a row's state to a cached state."""
    packed = np.zeros(_EXPORT_LAYOUT.size, np.int32)
    fields = _EXPORT_LAYOUT.unpack(packed)
    for name, value in export._asdict().items():
        fields[name][...] = value
    return StepPlan(EXPORT, packed)


def pack_copy(copy: Read | Write, shapes: StepShapes) -> StepPlan:
    """Return the plan that reads or writes a block."""
    kinds = (READ, READ_STATE) if isinstance(copy, Read) else (WRITE, WRITE_STATE)
    packed = pack_block(copy, 1 if copy.block.is_state else shapes.block_pages)
    return StepPlan(kinds[copy.block.is_state], packed, block=copy.block)


def pack_plan(program: PlacesRows, shapes: StepShapes, values: dict[str, Any]) -> np.ndarray:
    """Pack `values` for `program`; a list shorter than its field is padded with its "none" value.

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

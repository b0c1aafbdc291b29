"""Device state between steps: `BatchState`, one row per running request, and `EngineState`."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheSpec, Pools, PoolSizes, allocate, allocate_checkpoints
from jaxspec.layout import PackedLayout
from jaxspec.models.base import ForwardOutput
from jaxspec.plan.plan import (
    AfterForwardPass,
    AnyProgram,
    ForwardPass,
    MoveRows,
    Program,
    WriteAutomaton,
    WriteMasks,
    WriteProcessorArgs,
    WriteTables,
)
from jaxspec.plan.row import row_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.logits_processors import LogitsProcessor
from jaxspec.sampling.processor_tables import ProcessorTables
from jaxspec.sampling.tables import SamplingTables


@flax.struct.dataclass
class BatchState:
    """Rows of the running requests, with the fields of `jaxspec.plan.row.FIELDS` as attributes.

    `rows.slot` is int32 `[rows]`, `rows.drafts` int32 `[rows, K]`, `rows.top_p` float32 `[rows]`. A
    row has some 140 bytes, so rows are moved by one gather. Larger data is in pools that never
    move, at index `slot`. A row of zeros is empty: slot 0 is the null slot.
    """

    fields: Int[Array, "rows fields"]  # floats as bits: another leaf would cost kernels per step

    def __getattr__(self, name: str) -> Array:
        if name not in row_layout(0).fields:
            raise AttributeError(f"{name!r} is no field of jaxspec.plan.row.FIELDS")
        return self.layout.read(self.fields, name)

    @property
    def num_rows(self) -> int:
        """Number of rows, including empty ones."""
        return self.fields.shape[0]

    @property
    def layout(self) -> PackedLayout:
        """Layout of the fields; K follows from the size of a row."""
        return row_layout(self.fields.shape[-1] - row_layout(0).size)

    @property
    def is_live(self) -> Array:
        """Rows with an unfinished request, bool `[rows]`."""
        return (self.slot > 0) & (self.finish == 0)

    def take(self, index: Int[Array, " n"]) -> "BatchState":
        """Return the rows at `index`; an index past the end returns an empty row."""
        return BatchState(self.fields.at[index].get(mode="fill", fill_value=0))

    def put(self, index: Int[Array, " n"], rows: "BatchState") -> "BatchState":
        """Return this state with `rows` at `index`; an index past the end is dropped."""
        return BatchState(self.fields.at[index].set(rows.fields, mode="drop"))

    def with_fields(self, **fields: Array) -> "BatchState":
        """Return this state with some columns replaced.

        Raises:
            KeyError: a column does not exist.
            ValueError: a column has a wrong dtype, shape or number of rows.
        """
        if not fields:
            return self
        layout = self.layout
        columns = {name: self.fields[:, where] for name, where in layout.slices.items()}
        for name, value in fields.items():
            bits = layout.bits(name, value)
            if len(bits) != self.num_rows:
                raise ValueError(f"The field {name} has {len(bits)} rows, give {self.num_rows}.")
            columns[name] = bits
        # A concatenation is one kernel; slice updates would be one kernel per field.
        return BatchState(jnp.concatenate(list(columns.values()), axis=1))


@flax.struct.dataclass
class EngineState:
    """State that a step reads and replaces; donated, so that it is updated in place."""

    rows: BatchState
    page_tables: Int[Array, "slots pages"]  # page 0 is the null page
    pools: Pools
    draft_logits: Float[Array, "slots drafts vocab"] | None  # logits of probabilistic drafts
    tables: SamplingTables = flax.struct.field(default_factory=SamplingTables)
    checkpoints: Pools | None = None  # cached states, no argument of a step
    forward: ForwardOutput | None = None  # from the first half of a step to the second

    def of(self, program: AnyProgram) -> "EngineState":
        """Return the part that is an argument of the program: only the tables it uses."""
        match program:
            case ForwardPass():
                return self._with(SamplingTables(), forward=self.forward)
            case AfterForwardPass():
                return self._with(self.tables.of(program.features), forward=self.forward)
            case Program():
                return self._with(self.tables.of(program.features))
            case MoveRows(restores=False):
                return self._with(SamplingTables(seen=self.tables.seen))
            case WriteTables() | WriteMasks():
                return self._with(SamplingTables(bias=self.tables.bias))
            case WriteAutomaton():
                return self._with(SamplingTables(automata=self.tables.automata))
            case WriteProcessorArgs():
                return self._with(SamplingTables(processors=self.tables.processors))
            case _:
                return self._with(SamplingTables(), self.checkpoints)

    def replaced_by(self, newer: "EngineState") -> "EngineState":
        """Return `newer` with the parts of this state that were no arguments of its program."""
        kept = self.checkpoints if newer.checkpoints is None else newer.checkpoints
        forward = self.forward if newer.forward is None else newer.forward
        return newer._with(self.tables.replaced_by(newer.tables), kept, forward)

    def _with(
        self,
        tables: SamplingTables,
        checkpoints: Pools | None = None,
        forward: ForwardOutput | None = None,
    ) -> "EngineState":
        # Called twice per dispatch; `dataclasses.replace` takes four times as long.
        parts = self.rows, self.page_tables, self.pools, self.draft_logits
        return EngineState(*parts, tables, checkpoints, forward)


def empty_rows(num_rows: int, num_drafts: int) -> BatchState:
    return BatchState(jnp.zeros((num_rows, row_layout(num_drafts).size), jnp.int32))


def empty_state(
    shapes: StepShapes,
    specs: Sequence[CacheSpec],
    drawn_ids: int,
    vocab_size: int,
    forward: ForwardOutput,
    processors: tuple[LogitsProcessor, ...] = (),
) -> EngineState:
    """Return the state of an engine without requests; `jax.eval_shape` of it gives its size.

    Args:
        shapes: Sizes of the state.
        specs: Specs of the pools.
        drawn_ids: Size of the distributions that drafts are sampled from; 0 for greedy drafts.
        vocab_size: Size of the model's logits.
        forward: Output of the model for one token; its values are not read.
        processors: Logits processors of the engine.
    """
    processor_tables = ProcessorTables.empty(shapes, processors)
    num_slots, num_drafts = shapes.num_slots, shapes.num_drafts
    sizes = PoolSizes(shapes.num_pages, shapes.page_size, num_slots, shapes.width)
    distributions = (num_slots, num_drafts, drawn_ids)
    num_tokens = shapes.max_num_seqs * shapes.width
    return EngineState(
        rows=empty_rows(shapes.max_num_seqs, num_drafts),
        page_tables=jnp.zeros((num_slots, shapes.pages_per_seq), jnp.int32),
        pools=allocate(specs, sizes),
        draft_logits=jnp.zeros(distributions, jnp.float32) if drawn_ids else None,
        tables=SamplingTables.empty(
            num_slots,
            vocab_size,
            shapes.max_model_len,
            shapes.width,
            shapes.recent_tokens,
            processor_tables,
        ),
        checkpoints=allocate_checkpoints(specs, sizes, shapes.num_checkpoints),
        forward=jax.tree.map(lambda x: jnp.zeros((num_tokens, x.shape[1]), x.dtype), forward),
    )

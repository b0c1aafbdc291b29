"""BatchState: everything remembered between steps about the running requests, one row each."""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheSpec, Pools, PoolSizes, allocate, allocate_checkpoints
from jaxspec.config import StepShapes
from jaxspec.layout import PackedLayout
from jaxspec.plan import Program
from jaxspec.row import row_layout
from jaxspec.sampling.tables import SamplingTables


@flax.struct.dataclass
class BatchState:
    """One leaf, whose columns are the fields of `jaxspec.row.FIELDS`, each by its name.

    `rows.slot` is int32 `[rows]`, `rows.drafts` int32 `[rows, K]`, `rows.top_p` float32 `[rows]`. A
    row is some 140 bytes, so moving rows is one gather. What is big lives in pools that never move,
    at index `slot`. A row of zeros is empty: slot 0 is the null slot.
    """

    fields: Int[Array, "rows fields"]  # floats by their bits: a second leaf costs kernels a step

    def __getattr__(self, name: str) -> Array:
        """The column `name`."""
        if name not in row_layout(0).fields:
            raise AttributeError(f"{name!r} is no field of jaxspec.row.FIELDS")
        return self.layout.read(self.fields, name)

    @property
    def num_rows(self) -> int:
        """Rows, empty ones too."""
        return self.fields.shape[0]

    @property
    def layout(self) -> PackedLayout:
        """Where each field lies; the size of a row tells K."""
        return row_layout(self.fields.shape[-1] - row_layout(0).size)

    @property
    def is_live(self) -> Array:
        """Rows that hold a request which has not finished. bool [rows]"""
        return (self.slot > 0) & (self.finish == 0)

    def take(self, index: Int[Array, " n"]) -> "BatchState":
        """Rows `index`; an index past the end gives an empty row."""
        return BatchState(self.fields.at[index].get(mode="fill", fill_value=0))

    def put(self, index: Int[Array, " n"], rows: "BatchState") -> "BatchState":
        """This state with `rows` at `index`; an index past the end writes nothing."""
        return BatchState(self.fields.at[index].set(rows.fields, mode="drop"))

    def with_fields(self, **fields: Array) -> "BatchState":
        """This state with some columns replaced.

        Raises:
            KeyError: there is no such column.
            ValueError: a column has another dtype, another shape, or not as many rows.
        """
        layout = self.layout
        columns = {name: self.fields[:, where] for name, where in layout.slices.items()}
        for name, value in fields.items():
            bits = layout.bits(name, value)
            if len(bits) != self.num_rows:
                raise ValueError(f"The field {name} has {len(bits)} rows, give {self.num_rows}.")
            columns[name] = bits
        # One concatenation is one kernel; an update of a slice would be one for each field.
        return BatchState(jnp.concatenate(list(columns.values()), axis=1))


@flax.struct.dataclass
class EngineState:
    """All that a step reads and replaces; donated to it, so it is written in place."""

    rows: BatchState
    page_tables: Int[Array, "slots pages"]  # page 0 is the null page
    pools: Pools
    draft_logits: Float[Array, "slots drafts vocab"] | None  # of probabilistic drafts
    tables: SamplingTables = flax.struct.field(default_factory=SamplingTables)
    checkpoints: Pools | None = None  # states of prefixes, which a step is not given

    def of(self, program: Program) -> "EngineState":
        """What the program is given, which no other's tables or checkpoints cost anything."""
        checkpoints = None if program.checkpoint == "none" else self.checkpoints
        return self._with(self.tables.of(program.sampler), checkpoints)

    def replaced_by(self, newer: "EngineState") -> "EngineState":
        """`newer`, with the tables and checkpoints that its program was not given."""
        kept = self.checkpoints if newer.checkpoints is None else newer.checkpoints
        return newer._with(self.tables.replaced_by(newer.tables), kept)

    def _with(self, tables: SamplingTables, checkpoints: Pools | None) -> "EngineState":
        # Each dispatch asks for two, and `dataclasses.replace` takes four times as long.
        parts = self.rows, self.page_tables, self.pools, self.draft_logits
        return EngineState(*parts, tables, checkpoints)


def empty_rows(num_rows: int, num_drafts: int) -> BatchState:
    """`num_rows` empty rows."""
    return BatchState(jnp.zeros((num_rows, row_layout(num_drafts).size), jnp.int32))


def empty_state(
    shapes: StepShapes, specs: Sequence[CacheSpec], drawn_ids: int, vocab_size: int
) -> EngineState:
    """The state of an engine without requests. `jax.eval_shape` of it tells what it would hold.

    `drawn_ids`: ids of the distribution that a draft is drawn from; 0: drafts are not drawn.
    `vocab_size`: ids of the model's logits.
    """
    num_slots, num_drafts = shapes.num_slots, shapes.num_drafts
    sizes = PoolSizes(shapes.num_pages, shapes.page_size, num_slots, shapes.width)
    distributions = (num_slots, num_drafts, drawn_ids)
    return EngineState(
        rows=empty_rows(shapes.max_num_seqs, num_drafts),
        page_tables=jnp.zeros((num_slots, shapes.pages_per_seq), jnp.int32),
        pools=allocate(specs, sizes),
        draft_logits=jnp.zeros(distributions, jnp.float32) if drawn_ids else None,
        tables=SamplingTables.empty(num_slots, vocab_size, shapes.max_model_len),
        checkpoints=allocate_checkpoints(specs, sizes, shapes.num_checkpoints),
    )

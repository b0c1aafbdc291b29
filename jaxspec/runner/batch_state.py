"""BatchState: everything remembered between steps about the running requests, one row each."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache import Pools
from jaxspec.plan import PackedLayout, batch_row_layout

_WITHOUT_DRAFTS = batch_row_layout(0).size


def _column(name: str, meaning: str) -> property:
    def read(state: "BatchState") -> Int[Array, " rows"]:
        return state.layout.unpack(state.fields)[name]

    return property(read, doc=meaning)


def _float_column(name: str, meaning: str) -> property:
    def read(state: "BatchState") -> Float[Array, " rows"]:
        return jax.lax.bitcast_convert_type(state.layout.unpack(state.fields)[name], jnp.float32)

    return property(read, doc=meaning)


@flax.struct.dataclass
class BatchState:
    """One leaf; the named properties are views of its columns.

    A row is some 140 bytes, so moving rows is one gather. What is big lives in pools that
    never move, at index `slot`. A row of zeros is empty: slot 0 is the null slot.
    """

    fields: Int[Array, "rows fields"]  # floats by their bits: a second leaf costs kernels a step

    slot = _column("slot", "Index into every pool; 0: the row is empty.")
    prefill_len = _column("prefill_len", "Tokens the request entered with.")
    min_len = _column("min_len", "Tokens, prompt included, before which no stop id may come.")
    max_len = _column("max_len", "Tokens, prompt included, at which the request ends.")
    num_computed = _column("num_computed", "Tokens whose keys, values and states are cached.")
    last_token = _column("last_token", "The newest token, the first one not computed.")
    state_offset = _column("state_offset", "Drafts accepted last: which candidate state is true.")
    ring_length = _column("ring_length", "Tokens of the ring that the slot's state lacks.")
    finish = _column("finish", "A `Finish`; once set the row emits nothing more.")
    seed = _column("seed", "Key of the request's noise, with the position.")
    top_k = _column("top_k", "Tokens kept when sampling; 0 or less: all.")
    proposer_key = _column("proposer_key", "Entry of the proposer's own tables.")
    stop_ids = _column("stop_ids", "Ids that end the request, then -1. [rows, MAX_STOP_IDS]")
    num_drafts = _column("num_drafts", "Of `drafts`, how many were proposed.")
    drafts = _column("drafts", "To verify next, then -1. [rows, K]")
    temperature = _float_column("temperature", "0 is greedy.")
    top_p = _float_column("top_p", "Probability mass kept when sampling; 1: all.")

    @property
    def num_rows(self) -> int:
        """Rows, empty ones too."""
        return self.fields.shape[0]

    @property
    def layout(self) -> PackedLayout:
        """Where each field lies."""
        return batch_row_layout(self.fields.shape[-1] - _WITHOUT_DRAFTS)

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
        """This state with some columns, of integers, replaced.

        Raises:
            KeyError: there is no such column.
            ValueError: a column is not int32, or not as many rows.
        """
        columns = self.layout.unpack(self.fields)
        for name, value in fields.items():
            here = columns[name]
            if (value.dtype, value.shape) != (here.dtype, here.shape):
                raise ValueError(
                    f"The column {name} must be {here.dtype} {list(here.shape)}, got {value.dtype} "
                    f"{list(value.shape)}. Give a value for each row, floats by their bits."
                )
            columns[name] = value
        # One concatenation is one kernel; an update of a slice would be one for each field.
        shape = len(self.fields), -1
        return BatchState(jnp.concatenate([x.reshape(shape) for x in columns.values()], axis=1))


@flax.struct.dataclass
class EngineState:
    """All that a step reads and replaces; donated to it, so it is written in place."""

    rows: BatchState
    page_tables: Int[Array, "slots pages"]  # page 0 is the null page
    pools: Pools
    draft_logits: Float[Array, "slots drafts vocab"] | None  # of probabilistic drafts


def empty_rows(num_rows: int, num_drafts: int) -> BatchState:
    """`num_rows` empty rows."""
    return BatchState(jnp.zeros((num_rows, batch_row_layout(num_drafts).size), jnp.int32))

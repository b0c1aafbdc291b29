"""BatchState: everything remembered between steps about the running requests, one row each."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.cache import HybridCache
from jaxspec.plan import ROW_FLOATS, PackedLayout, row_ints

_FIXED_INTS = row_ints(0).size


def _column(name: str, meaning: str) -> property:
    def read(state: "BatchState") -> Int[Array, " rows"]:
        return state.int_layout.unpack(state.ints)[name]

    return property(read, doc=meaning)


def _float_column(name: str, meaning: str) -> property:
    def read(state: "BatchState") -> Float[Array, " rows"]:
        return ROW_FLOATS.unpack(state.floats)[name]

    return property(read, doc=meaning)


@flax.struct.dataclass
class BatchState:
    """Two leaves; the named properties are views of their columns.

    A row is a few hundred bytes, so moving rows is two gathers. What is big lives in pools that
    never move, at index `slot`. A row of zeros is empty: slot 0 is the null slot.
    """

    ints: Int[Array, "rows int_fields"]
    floats: Float[Array, "rows float_fields"]

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
    def int_layout(self) -> PackedLayout:
        """Where each integer field lies."""
        return row_ints(self.ints.shape[-1] - _FIXED_INTS)

    @property
    def is_live(self) -> Array:
        """Rows that hold a request which has not finished. bool [rows]"""
        return (self.slot > 0) & (self.finish == 0)

    def take(self, index: Int[Array, " n"]) -> "BatchState":
        """Rows `index`; an index past the end gives an empty row."""
        return BatchState(
            ints=self.ints.at[index].get(mode="fill", fill_value=0),
            floats=self.floats.at[index].get(mode="fill", fill_value=0),
        )

    def put(self, index: Int[Array, " n"], rows: "BatchState") -> "BatchState":
        """This state with `rows` at `index`; an index past the end writes nothing."""
        return BatchState(
            ints=self.ints.at[index].set(rows.ints, mode="drop"),
            floats=self.floats.at[index].set(rows.floats, mode="drop"),
        )

    def with_fields(self, **fields: Array) -> "BatchState":
        """This state with some integer columns replaced."""
        ints = self.ints
        for name, value in fields.items():
            columns = self.int_layout.slices[name]
            ints = ints.at[:, columns].set(value.reshape(len(ints), -1))
        return dataclasses.replace(self, ints=ints)


@flax.struct.dataclass
class EngineState:
    """All that a step reads and replaces; donated to it, so it is written in place."""

    rows: BatchState
    page_tables: Int[Array, "slots pages"]  # page 0 is the null page
    cache: HybridCache
    draft_logits: Float[Array, "slots drafts vocab"] | None  # of probabilistic drafts


def empty_rows(num_rows: int, num_drafts: int) -> BatchState:
    """`num_rows` empty rows."""
    return BatchState(
        ints=jnp.zeros((num_rows, row_ints(num_drafts).size), jnp.int32),
        floats=jnp.zeros((num_rows, ROW_FLOATS.size), jnp.float32),
    )

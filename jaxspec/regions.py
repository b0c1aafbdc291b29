"""The two parts of a step's tokens, as ops take them: decode rectangle and prompt chunks.

Index arrays are int32. Padding may hold anything: it is computed, and changes nothing.
"""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NO_SLOT = -1  # the keys and values of this token are written nowhere


@flax.struct.dataclass
class DecodeRegion:
    """The rectangle of `rows x width` tokens that decode: the last token of a row, then its drafts.

    A row is live if its slot is positive and it has tokens; any other row is padding.
    """

    slots: Int[Array, " rows"]  # request slot in every pool; 0 is the null slot
    num_computed: Int[Array, " rows"]  # tokens whose keys, values and states the pools hold
    query_len: Int[Array, " rows"]  # real tokens of the row, 0..width
    state_offset: Int[Array, " rows"]  # drafts accepted last: the true candidate
    ring_length: Int[Array, " rows"]  # tokens of the ring that the slot's state lacks

    def is_live(self, num_slots: int) -> Bool[Array, " rows"]:
        """Rows that a pool of `num_slots` slots is read and written for."""
        return is_live(self.slots, self.query_len, num_slots)


@flax.struct.dataclass
class PrefillRegion:
    """A flat stretch of tokens: chunks of at most `seqs` prompts, one after the other.

    Chunk `s` is `query_start[s]:query_start[s + 1]`; tokens from `query_start[-1]` on are padding.
    """

    slots: Int[Array, " seqs"]
    num_computed: Int[Array, " seqs"]
    query_start: Int[Array, " seqs+1"]
    state_offset: Int[Array, " seqs"]

    @property
    def query_len(self) -> Int[Array, " seqs"]:
        """Tokens of each chunk."""
        return self.query_start[1:] - self.query_start[:-1]

    def is_live(self, num_slots: int) -> Bool[Array, " seqs"]:
        """Chunks that a pool of `num_slots` slots is read and written for."""
        return is_live(self.slots, self.query_len, num_slots)


def is_live(
    slots: Int[Array, "..."], query_len: Int[Array, "..."], num_slots: int
) -> Bool[Array, "..."]:
    """The rule behind the regions' `is_live`; a kernel calls it on the indices of its one row."""
    return (slots > 0) & (slots < num_slots) & (query_len > 0)


def real_tokens(query_len: Int[Array, " rows"], width: int) -> Bool[Array, "rows width"]:
    """Which tokens of a rectangle are real: the first `query_len` of each row."""
    return jnp.arange(width, dtype=jnp.int32)[None, :] < query_len[:, None]

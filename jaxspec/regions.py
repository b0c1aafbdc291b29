"""The two parts of a step's tokens, as ops take them: decode rectangle and prompt chunks."""

import flax.struct
from jaxtyping import Array, Int


@flax.struct.dataclass
class DecodeRegion:
    """The rectangle of `rows x width` tokens that decode: the last token of a row, then its drafts.

    A row with slot 0 or `query_len` 0 is padding: it is computed and changes nothing.
    """

    slots: Int[Array, " rows"]  # request slot in every pool; 0 is the null slot
    num_computed: Int[Array, " rows"]  # tokens whose keys, values and states the caches hold
    query_len: Int[Array, " rows"]  # real tokens of the row, 0..width
    state_offset: Int[Array, " rows"]  # drafts accepted last: the true candidate
    ring_length: Int[Array, " rows"]  # tokens of the ring that the slot's state lacks


@flax.struct.dataclass
class PrefillRegion:
    """A flat stretch of tokens: chunks of at most `seqs` prompts, one after the other.

    Chunk `s` is `query_start[s]:query_start[s + 1]`; tokens from `query_start[-1]` on are padding.
    """

    slots: Int[Array, " seqs"]
    num_computed: Int[Array, " seqs"]
    query_start: Int[Array, " seqs+1"]
    state_offset: Int[Array, " seqs"]


NO_SLOT = -1  # the keys and values of this token are written nowhere

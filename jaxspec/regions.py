"""The two parts of a step's tokens as ops take them: decode rectangle and prompt chunks.

Index arrays are int32. Padding entries are arbitrary; ops compute them without side effects.
"""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NO_SLOT = -1  # KV slot of a token whose keys and values are discarded


@flax.struct.dataclass
class DecodeRegion:
    """The rectangle of `rows x width` decode tokens: each row's last token, then its drafts.

    A row is live if it has tokens and its slot is in `1..num_slots - 1`; other rows are padding.
    """

    slots: Int[Array, " rows"]  # state slot in every pool; 0 is the null slot
    num_computed: Int[Array, " rows"]  # tokens whose keys, values and states are in the pools
    query_len: Int[Array, " rows"]  # real tokens per row, 0..width
    state_offset: Int[Array, " rows"]  # drafts accepted last, the index of the valid state
    ring_length: Int[Array, " rows"]  # ring tokens not yet folded into the slot's state

    def is_live(self, num_slots: int) -> Bool[Array, " rows"]:
        """Return which rows ops read and write in a pool of `num_slots` slots."""
        return is_live(self.slots, self.query_len, num_slots)


@flax.struct.dataclass
class TokenRegion(DecodeRegion):
    """Tokens of decode rows and of prompt chunks alike, each as a row of width 1.

    Tokens of a slot are adjacent, in the order of their positions.
    """

    candidate: Int[Array, " rows"]  # where the state after the token is stored in its slot
    first: Int[Array, " rows"]  # index of the first token of the same slot
    end: Int[Array, " rows"]  # index after the last token of the same slot

    @classmethod
    def of(cls, rows: DecodeRegion, candidate: Int[Array, " rows"]) -> "TokenRegion":
        """Return the region of tokens in rows of their own: live ones first, slots adjacent."""
        is_same = rows.slots[:, None] == rows.slots[None, :]
        first = jnp.argmax(is_same, axis=1).astype(jnp.int32)
        end = first + jnp.sum(is_same, axis=1, dtype=jnp.int32)
        own = {field.name: getattr(rows, field.name) for field in dataclasses.fields(DecodeRegion)}
        return cls(**own, candidate=candidate, first=first, end=end)


@flax.struct.dataclass
class PrefillRegion:
    """A flat sequence of tokens: chunks of at most `seqs` prompts, one after the other.

    Chunk `s` is `query_start[s]:query_start[s + 1]`; tokens from `query_start[-1]` on are padding.
    """

    slots: Int[Array, " seqs"]
    num_computed: Int[Array, " seqs"]
    query_start: Int[Array, " seqs+1"]
    state_offset: Int[Array, " seqs"]

    @property
    def query_len(self) -> Int[Array, " seqs"]:
        """Tokens per chunk."""
        return self.query_start[1:] - self.query_start[:-1]

    def is_live(self, num_slots: int) -> Bool[Array, " seqs"]:
        """Return which chunks ops read and write in a pool of `num_slots` slots."""
        return is_live(self.slots, self.query_len, num_slots)


def is_live(
    slots: Int[Array, "..."], query_len: Int[Array, "..."], num_slots: int
) -> Bool[Array, "..."]:
    """The rule of the regions' `is_live`; kernels call it on the indices of a single row."""
    return (slots > 0) & (slots < num_slots) & (query_len > 0)


def real_tokens(query_len: Int[Array, " rows"], width: int) -> Bool[Array, "rows width"]:
    """Mask of a rectangle's real tokens: the first `query_len` of each row."""
    return jnp.arange(width, dtype=jnp.int32)[None, :] < query_len[:, None]


def owner_of(index: Int[Array, "*n"], ends: Int[Array, " parts"]) -> Int[Array, "*n"]:
    """Return which of adjacent parts each index is in; indices after all parts get the last one.

    Parts end before their `ends`, which do not decrease. They are compared one by one: a search
    would be a loop, which ends a GPU's CUDA graph.

        owner_of([0, 1, 2, 3], [1, 1, 3]) == [0, 2, 2, 2]
    """
    each = jnp.expand_dims(ends, tuple(range(index.ndim)))
    owner = jnp.sum(index[..., None] >= each, axis=-1, dtype=jnp.int32)
    return jnp.minimum(owner, len(ends) - 1)

"""Work of a layer's experts as a list of tiles: an expert and some tokens that chose it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.pallas.moe.route import Choices

_BLOCK = 256  # tokens counted by one matmul


@flax.struct.dataclass
class WorkList:
    """Tiles of up to `rows` choices of one expert, sorted by expert; tiles without work are last.

    A choice is a token's part: `token * parts + part`. With 2 parts per token, where tokens 0, 1
    and 2 chose experts 3 and 5, 3 and 4, and 5 and 3, tiles of 2 rows are

        expert     3     3    4    5
        count      2     1    1    2
        choices   0 2    5    3   1 4
        place     [[0, 6], [1, 4], [7, 2]]

    Choices of padding are listed under one more expert after the last.
    """

    expert: Int[Array, " tiles"]  # int32; greater than that of padding if a tile has no work
    count: Int[Array, " tiles"]  # int32; real rows of each tile
    place: Int[Array, "tokens parts"]  # int32; `tile * rows + row` of each choice
    rows: int = flax.struct.field(pytree_node=False)  # rows per tile

    @property
    def choices(self) -> Int[Array, "tiles rows"]:
        """Choice at each place, int32; -1 if the place is empty."""
        tokens, parts = self.place.shape
        empty = jnp.full(self.expert.shape[0] * self.rows, -1, jnp.int32)
        at_place = empty.at[self.place.reshape(-1)].set(jnp.arange(tokens * parts))
        return at_place.reshape(self.expert.shape[0], self.rows)


def max_tiles(choices: int, num_experts: int, rows: int) -> int:
    """Return the maximum number of tiles: each expert may have one that is not full.

    max_tiles(9, 256, 8) == 9; max_tiles(2304, 257, 16) == 384
    """
    return min(choices, num_experts + max(choices - num_experts, 0) // rows)


def work_list(choices: Choices, num_experts: int, rows: int) -> WorkList:
    """Return the tiles of at most `rows` choices for a layer of `num_experts` experts.

    Nothing depends on the host, and the number of tiles depends on shapes alone. A token must not
    choose an expert twice, except that of padding.
    """
    experts = choices.experts
    (tokens, parts), kinds = experts.shape, num_experts + 1
    has = experts[:, :, None] == jnp.arange(kinds)[None, None, :]
    before, held = _counted(jnp.sum(has, axis=1, dtype=jnp.int32))
    tiles = (held + rows - 1) // rows
    ends = _sums_up_to(tiles)
    starts = ends - tiles
    tile = jnp.arange(max_tiles(tokens * parts, kinds, rows), dtype=jnp.int32)
    expert = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    known = jnp.minimum(expert, num_experts)
    left = held[known] - (tile - starts[known]) * rows
    count = jnp.where(expert < kinds, jnp.minimum(left, rows), 0)
    rank = jnp.take_along_axis(before, experts, axis=1)
    # A token may have the expert of padding several times. XLA fuses a sum of columns.
    is_none, part = experts == num_experts, jnp.arange(parts)[None]
    for earlier in range(parts - 1):
        both = is_none & is_none[:, earlier : earlier + 1]
        rank += (both & (part > earlier)).astype(jnp.int32)
    return WorkList(expert, count, starts[experts] * rows + rank, rows)


def _counted(
    amounts: Int[Array, "tokens kinds"],
) -> tuple[Int[Array, "tokens kinds"], Int[Array, " kinds"]]:
    """Return how often earlier tokens chose each kind of expert, and how often all tokens did.

    A matmul with a triangle of ones computes the sums: on an H200 it takes 3 us for 256 tokens'
    choices, and sorting takes 20 us (docs/hopper.md). Amounts up to 256 are exact in bfloat16, and
    sums in float32.
    """
    tokens, kinds = amounts.shape
    size = min(max(tokens, 1), _BLOCK)
    number = max(-(-tokens // size), 1)  # at least one, because the last block is read
    padded = jnp.pad(amounts, ((0, number * size - tokens), (0, 0)))
    blocks = padded.reshape(number, size, kinds).astype(jnp.bfloat16)
    earlier = jnp.tril(jnp.ones((size, size), jnp.bfloat16), -1)
    within = jnp.matmul(earlier, blocks, preferred_element_type=jnp.float32)
    of_block = within[:, -1] + blocks[:, -1].astype(jnp.float32)
    up_to = jnp.cumsum(of_block, axis=0)
    counted = (within + (up_to - of_block)[:, None, :]).reshape(number * size, kinds)[:tokens]
    return counted.astype(jnp.int32), up_to[-1].astype(jnp.int32)


def _sums_up_to(x: Int[Array, " n"]) -> Int[Array, " n"]:
    place = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(place[None] <= place[:, None], x[None], 0), axis=1, dtype=jnp.int32)

"""The work of a layer's experts as a list of tiles: an expert and some tokens that chose it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.pallas.moe.route import Choices


@flax.struct.dataclass
class WorkList:
    """Tiles of up to `rows` choices of one expert; those with work come first, by expert.

    A choice is a token's part: `token * parts + part`. With 2 parts a token, where tokens 0, 1 and
    2 chose experts 3 and 5, 3 and 4, and 5 and 3, tiles of 2 rows are

        expert     3     3    4    5
        choices   0 2    5    3   1 4
    """

    expert: Int[Array, " tiles"]  # int32
    choices: Int[Array, "tiles rows"]  # int32; -1 where a tile has fewer
    count: Int[Array, ""]  # tiles with work

    @property
    def rows(self) -> int:
        """Choices of a tile."""
        return self.choices.shape[1]


def max_tiles(choices: int, num_experts: int, rows: int) -> int:
    """Tiles that so many choices can need: each expert may have one that is not full.

    max_tiles(9, 256, 8) == 9; max_tiles(2304, 257, 16) == 384
    """
    return min(choices, num_experts + max(choices - num_experts, 0) // rows)


def work_list(choices: Choices, num_experts: int, rows: int) -> WorkList:
    """The tiles of at most `rows` choices that a layer of `num_experts` experts has to do.

    Choices of experts beyond the last, as padding makes them, are in no tile. Nothing depends on
    the host, and the number of tiles alone on shapes.
    """
    experts = choices.experts.reshape(-1)
    total = experts.shape[0]
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    held = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
    first = jnp.cumsum(held) - held  # of each expert's choices, in `order`
    tiles = (held + rows - 1) // rows
    ends = jnp.cumsum(tiles)  # of each expert's tiles
    tile = jnp.arange(max_tiles(total, num_experts, rows), dtype=jnp.int32)
    expert = jnp.sum(tile[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    begin = (tile - (ends - tiles)[expert]) * rows  # in the expert's choices
    place = begin[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
    is_real = (place < held[expert][:, None]) & (tile < ends[-1])[:, None]
    at = jnp.minimum(first[expert][:, None] + place, total - 1)
    return WorkList(expert, jnp.where(is_real, order[at], -1), ends[-1])

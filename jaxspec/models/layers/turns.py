"""Turns: the tokens of a `TokenRegion` that a mixer computes at once."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.row_tiles import takes_turns_alone


class Turns(NamedTuple):
    """The turn of each token of a tile. All turns have one number of rows, so one order of sums.

    On a CPU a token has a turn of its own: a row of padding takes as long as another one. On a GPU
    a turn has a row for each token of the tile. A recurrent mixer computes the tokens of a slot in
    turns one after the other, here with `in_order`:

        slot          3 3 3 5 7 7 .
        turn          0 1 2 0 0 1
        first turn    0 . . 3 4 . .
    """

    turn: Int[Array, " tokens"]  # `count` for padding
    count: Int[Array, ""]
    rows: int  # tokens per turn

    @classmethod
    def of(cls, inputs: ModelInputs, *, in_order: bool) -> "Turns":
        """Return the turns of a step whose decode region is a `TokenRegion`, live tokens first."""
        live, size = inputs.live, len(inputs.live)
        if takes_turns_alone():
            count = jnp.sum(live, dtype=jnp.int32)
            return cls(jnp.arange(size, dtype=jnp.int32), count, 1)
        if in_order:
            slots, token = inputs.decode.slots, jnp.arange(size)
            is_before = (slots[None] == slots[:, None]) & (token[None] < token[:, None])
            is_before = is_before & live[None]
            turn = jnp.sum(is_before, axis=1, dtype=jnp.int32)
        else:
            turn = jnp.zeros(size, jnp.int32)
        count = jnp.max(jnp.where(live, turn + 1, 0))
        return cls(jnp.where(live, turn, count), count, size)

    def members(self, turn: Int[Array, ""]) -> Int[Array, " rows"]:
        """Return the tokens of a turn, in place; a row without a token has the number of tokens."""
        if self.rows == 1:
            return turn[None]
        size = len(self.turn)
        return jnp.where(self.turn == turn, jnp.arange(size, dtype=jnp.int32), size)

"""TokenRounds: the tokens of a `TokenRegion` that a mixer computes at once."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.row_tiles import mixes_one_token


class TokenRounds(NamedTuple):
    """The round of each token of a tile. All have one number of rows, so one order of sums.

    On a CPU a round has one token: a row of padding takes as long as another one. On a GPU it has a
    row for each token of the tile. A mixer that decodes in order computes the tokens of a slot in
    rounds one after the other, here with `in_order`:

        slot           3 3 3 5 7 7 .
        round          0 1 2 0 0 1
        first round    0 . . 3 4 . .
    """

    number: Int[Array, " tokens"]  # of each token's round; `count` for padding
    count: Int[Array, ""]
    rows: int  # tokens per round

    @classmethod
    def of(cls, inputs: ModelInputs, *, in_order: bool) -> "TokenRounds":
        """Return the rounds of a step whose decode region is a `TokenRegion`, live tokens first."""
        live, size = inputs.live, len(inputs.live)
        if mixes_one_token():
            count = jnp.sum(live, dtype=jnp.int32)
            return cls(jnp.arange(size, dtype=jnp.int32), count, 1)
        if in_order:
            slots, token = inputs.decode.slots, jnp.arange(size)
            is_before = (slots[None] == slots[:, None]) & (token[None] < token[:, None])
            is_before = is_before & live[None]
            number = jnp.sum(is_before, axis=1, dtype=jnp.int32)
        else:
            number = jnp.zeros(size, jnp.int32)
        count = jnp.max(jnp.where(live, number + 1, 0))
        return cls(jnp.where(live, number, count), count, size)

    def members(self, number: Int[Array, ""]) -> Int[Array, " rows"]:
        """Return a round's tokens, in place; a row without a token has the number of tokens."""
        if self.rows == 1:
            return number[None]
        size = len(self.number)
        return jnp.where(self.number == number, jnp.arange(size, dtype=jnp.int32), size)

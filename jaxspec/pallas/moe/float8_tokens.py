"""Activations of experts in FP8, as kernels read them."""

from math import prod
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.float8_terms import of_whole_rows
from jaxspec.weight import Float8BlockExperts, Published8BitExperts


@flax.struct.dataclass
class Float8Tokens:
    """`Terms` of the rows of all tiles, one after the other, padded to a multiple of 8."""

    numbers: tuple[Float[Array, "padded columns"], ...]  # of each term; maybe all in one array
    factors: Float[Array, "chunks padded"]  # float32
    starts: tuple[int, ...] = flax.struct.field(pytree_node=False)  # first columns of the terms

    @staticmethod
    def of(
        x: Float[Array, "*tiles rows features"], weight: Published8BitExperts, interpret: Any = None
    ) -> "Float8Tokens":
        """Return `x` in the terms of `weight`, padded to its features."""
        from jaxspec.pallas.matmul.float8_split_kernel import split_kernel

        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        if x.shape[-1] < weight.inner:
            rows = jnp.pad(rows, ((0, 0), (0, weight.inner - x.shape[-1])))
        if weight.terms == 1 and not isinstance(weight, Float8BlockExperts):
            terms = of_whole_rows(rows)
        else:
            terms = split_kernel(rows, weight.terms, interpret=interpret)
        return Float8Tokens(terms.numbers, terms.factors, (0,) * weight.terms)

    @property
    def joined(self) -> Float[Array, "padded all_columns"]:
        """The numbers of all terms side by side."""
        return jnp.concatenate(self.numbers, axis=1)

    def in_tiles(
        self, joined: Float[Array, "tiles rows all_columns"], tokens: Int[Array, "tiles rows"]
    ) -> "Float8Tokens":
        """Return tiles with these rows of `joined`, of these tokens.

        A place without a token may have any number, and then any factors.
        """
        tiles, rows, columns = joined.shape
        factors = jnp.take(self.factors, tokens.reshape(tiles * rows), axis=1, mode="clip")
        terms = len(self.numbers)
        starts = tuple(range(0, columns, columns // terms))
        return Float8Tokens((joined.reshape(tiles * rows, columns),) * terms, factors, starts)

"""What a feed-forward layer does between its two products, for ops and for kernels."""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Activation(enum.Enum):
    """The nonlinearity of a feed-forward layer, `down(activation(up(x)))`.

    A column of its output is made of one or two columns of the first product, its pieces.
    """

    SWIGLU = "silu(gate) * up"  # Shazeer 2020, "GLU Variants Improve Transformer", 2002.05202
    SQUARED_RELU = "relu(up) ** 2"  # So et al. 2021, "Primer", arXiv 2109.08668

    @property
    def pieces(self) -> int:
        """Columns of the first product for each that is put out: gate and up, or up alone."""
        return 2 if self is Activation.SWIGLU else 1

    def __call__(self, x: Float[Array, "tokens columns"]) -> Float[Array, "tokens features"]:
        """The output in the dtype of `x`; its columns are those of the gate, if any, then of up.

        Raises:
            ValueError: the columns cannot be cut into pieces of one size.
        """
        self.check(x.shape[-1])
        if self is Activation.SQUARED_RELU:
            return jnp.square(jax.nn.relu(x))
        gate, up = jnp.split(x, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def of_pieces(self, pieces):
        """The float32 output for float32 pieces, in the operations that Mosaic has."""
        if self is Activation.SQUARED_RELU:
            (up,) = pieces
            positive = jnp.where(up < 0.0, 0.0, up)  # and not a maximum, which may lose a NaN
            return positive * positive
        gate, up = pieces
        return gate / (1.0 + jnp.exp(-gate)) * up

    def check(self, columns: int) -> None:
        """Refuse columns that cannot be cut into pieces of one size.

        Raises:
            ValueError: the number of columns is odd, and there are gates among them.
        """
        if columns % self.pieces:
            raise ValueError(
                f"Gate and up must have the same number of columns, but {columns} columns came for "
                "both. Hand over both side by side, gate first."
            )

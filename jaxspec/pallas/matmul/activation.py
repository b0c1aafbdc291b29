"""Activations between the two matmuls of a feed-forward layer, for ops and for kernels."""

import enum
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LIMIT, _ALPHA = 7.0, 1.702  # of gpt-oss
_GELU = 2.0 * math.sqrt(2.0 / math.pi)


class Activation(enum.Enum):
    """Nonlinearity of a feed-forward layer, `down(activation(up(x)))`.

    Each output column is computed from one or two columns of the first matmul, its pieces.
    """

    SWIGLU = "silu(gate) * up"  # Shazeer 2020, "GLU Variants Improve Transformer", 2002.05202
    GEGLU = "gelu(gate) * up"  # likewise; GELU by its approximation with tanh
    SQUARED_RELU = "relu(up) ** 2"  # So et al. 2021, "Primer", arXiv 2109.08668
    # gpt-oss: gate and up are clamped, and their columns alternate.
    CLAMPED_SWIGLU = "gate * sigmoid(1.702 * gate) * (up + 1)"

    @property
    def pieces(self) -> int:
        """Columns of the first matmul per output column: gate and up, or up alone."""
        return 1 if self is Activation.SQUARED_RELU else 2

    @property
    def alternates(self) -> bool:
        """True if columns of gate and up alternate; otherwise all of the gate's come first."""
        return self is Activation.CLAMPED_SWIGLU

    def __call__(
        self, x: Float[Array, "*tokens columns"], limit: Array | None = None
    ) -> Float[Array, "*tokens features"]:
        """Apply the activation in the dtype of `x`, whose columns are the gate's, if any, and up's.

        Args:
            x: The output of the first matmul.
            limit: For SwiGLU: the most that silu(gate), and up's magnitude, can be (Ling-3.0).

        Raises:
            ValueError: the number of columns is odd, but gate and up need half each.
        """
        self.check(x.shape[-1])
        if self is Activation.SQUARED_RELU:
            return jnp.square(jax.nn.relu(x))
        if self is Activation.CLAMPED_SWIGLU:
            gate = jnp.minimum(x[..., ::2], _LIMIT)
            up = jnp.clip(x[..., 1::2], -_LIMIT, _LIMIT)
            return gate * jax.nn.sigmoid(gate * _ALPHA) * (up + 1.0)
        gate, up = jnp.split(x, 2, axis=-1)
        if self is Activation.GEGLU:
            return jax.nn.gelu(gate, approximate=True) * up
        gate = jax.nn.silu(gate)
        if limit is not None:
            limit = limit.astype(x.dtype)
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * up

    def of_blocks(self, pieces):
        """Apply the activation to float32 pieces, with operations that Mosaic supports."""
        if self is Activation.SQUARED_RELU:
            (up,) = pieces
            positive = jnp.where(up < 0.0, 0.0, up)  # not a maximum, which may drop a NaN
            return positive * positive
        assert not self.alternates, "no kernel takes alternating columns"
        gate, up = pieces
        if self is Activation.GEGLU:  # tanh(x) is 2 / (1 + exp(-2 x)) - 1
            twice = _GELU * (gate + 0.044715 * gate * gate * gate)
            return gate / (1.0 + jnp.exp(-twice)) * up
        return gate / (1.0 + jnp.exp(-gate)) * up

    def check(self, columns: int) -> None:
        """Check that the columns divide equally between gate and up.

        Raises:
            ValueError: the number of columns is odd, but gate and up need half each.
        """
        if columns % self.pieces:
            raise ValueError(
                f"Gate and up must have the same number of columns, but {columns} columns came for "
                "both. Hand over both side by side, gate first."
            )

"""The output gate of attention: each head multiplied by the sigmoid of a part of the projection."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@flax.struct.dataclass
class OutputGate:
    """Multiplies attended heads by the sigmoid of their gates.

    Head by head the projection has `head_dim` columns of query and then as many of gate; columns
    behind the last head are not read. The product is in float32 and is rounded to the dtype of the
    heads.

    Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv 2505.06708.
    """

    projected: Float[Array, "tokens columns"]

    def split(self, tokens: int) -> "tuple[OutputGate, OutputGate]":
        """The gate of the first `tokens`, and that of the others."""
        return OutputGate(self.projected[:tokens]), OutputGate(self.projected[tokens:])

    def check(self, tokens: int, heads: int, head_dim: int) -> None:
        """Refuse a projection of other tokens or heads.

        Raises:
            ValueError: the projection has other rows, or lacks columns.
        """
        columns = 2 * heads * head_dim
        if self.projected.shape[0] != tokens or self.projected.shape[1] < columns:
            raise ValueError(
                f"The gates of {tokens} tokens with {heads} heads of {head_dim} need a projection "
                f"of {tokens} rows and at least {columns} columns, got {self.projected.shape}. "
                "Hand over all of it, for the same tokens, padding included."
            )

    def __call__(
        self, attended: Float[Array, "tokens heads head_dim"]
    ) -> Float[Array, "tokens heads head_dim"]:
        """The gated heads, computed by XLA; ValueError as `check` says."""
        tokens, heads, head_dim = attended.shape
        self.check(tokens, heads, head_dim)
        pairs = self.projected[:, : 2 * heads * head_dim].reshape(tokens, heads, 2, head_dim)
        gate = jax.nn.sigmoid(pairs[:, :, 1].astype(jnp.float32))
        return (attended.astype(jnp.float32) * gate).astype(attended.dtype)


def gate_in_kernel(attended: Any, gate: Any) -> Any:
    """The float32 product inside a kernel; `gate` is as large as `attended`, in any dtype."""
    return attended.astype(jnp.float32) / (1.0 + jnp.exp(-gate.astype(jnp.float32)))

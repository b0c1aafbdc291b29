"""The output gate of attention: each head multiplied by the sigmoid of a part of the projection."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@flax.struct.dataclass
class OutputGate:
    """What multiplies attended heads: the sigmoid of gates.

    Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv 2505.06708.

    Head by head the projection has `head_dim` columns of query and then as many of gate; the others
    behind all heads are not read. The product is float32, and rounded to the dtype of the heads.
    """

    projected: Float[Array, "tokens columns"]

    def split(self, tokens: int) -> "tuple[OutputGate, OutputGate]":
        """Of the first `tokens`, and of the others."""
        return OutputGate(self.projected[:tokens]), OutputGate(self.projected[tokens:])

    def check(self, tokens: int, heads: int, head_dim: int) -> None:
        """Refuse a projection that is not of so many tokens and heads.

        Raises:
            ValueError: it has other rows, or lacks columns.
        """
        least = 2 * heads * head_dim
        if self.projected.shape[0] != tokens or self.projected.shape[1] < least:
            raise ValueError(
                f"Of {tokens} tokens and {heads} heads of {head_dim} the projection must have "
                f"{tokens} rows and at least {least} columns, got {self.projected.shape}. Hand "
                "over all of it, for the same tokens, padding too."
            )

    def __call__(
        self, attended: Float[Array, "tokens heads head_dim"]
    ) -> Float[Array, "tokens heads head_dim"]:
        """By XLA."""
        tokens, heads, head_dim = attended.shape
        self.check(tokens, heads, head_dim)
        pairs = self.projected[:, : 2 * heads * head_dim].reshape(tokens, heads, 2, head_dim)
        gate = jax.nn.sigmoid(pairs[:, :, 1].astype(jnp.float32))
        return (attended.astype(jnp.float32) * gate).astype(attended.dtype)


def in_kernel(attended: Any, gate: Any) -> Any:
    """The product in float32, in a kernel: `gate` in any dtype, as many as `attended`."""
    return attended.astype(jnp.float32) / (1.0 + jnp.exp(-gate.astype(jnp.float32)))

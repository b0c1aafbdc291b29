"""Output gate of attention: multiply each head by the sigmoid of gate columns of the projection."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@flax.struct.dataclass
class OutputGate:
    """Multiply attended heads by the sigmoid of their gates.

    For each head, the projection has `head_dim` query columns followed by `head_dim` gate columns;
    columns after the last head are not read. The result is computed in float32 and rounded to the
    dtype of the heads.

    Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv 2505.06708.
    """

    projected: Float[Array, "tokens columns"]

    def split(self, tokens: int) -> "tuple[OutputGate, OutputGate]":
        """Return the gate of the first `tokens` tokens, and the gate of the rest."""
        return OutputGate(self.projected[:tokens]), OutputGate(self.projected[tokens:])

    def check(self, tokens: int, heads: int, head_dim: int) -> None:
        """Check that the projection matches `tokens` tokens with these heads.

        Raises:
            ValueError: The projection has the wrong number of rows, or too few columns.
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
        """Return the gated heads, computed by XLA; raises ValueError as `check` does."""
        tokens, heads, head_dim = attended.shape
        self.check(tokens, heads, head_dim)
        pairs = self.projected[:, : 2 * heads * head_dim].reshape(tokens, heads, 2, head_dim)
        gate = jax.nn.sigmoid(pairs[:, :, 1].astype(jnp.float32))
        return (attended.astype(jnp.float32) * gate).astype(attended.dtype)


def gate_in_kernel(attended: Any, gate: Any) -> Any:
    """Gate heads inside a kernel, in float32; `gate` has the shape of `attended`, in any dtype."""
    return attended.astype(jnp.float32) / (1.0 + jnp.exp(-gate.astype(jnp.float32)))

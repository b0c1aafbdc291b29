"""Output norm of the delta rule's layers: each head is normalised, then gated."""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas.norm.rms_norm import rms_norm

Gate = Literal["silu", "sigmoid"]

# Output of a recurrence: float32 heads or, with two axes, the result of `GatedNorm` on them.
Heads = Float[Array, "tokens heads dim"] | Float[Array, "tokens features"]


def check_gates(
    gates: Float[Array, "tokens columns"], first: int, tokens: int, features: int
) -> None:
    """Raise ValueError unless `gates` has `tokens` rows, and `features` columns from `first` on."""
    rows, columns = gates.shape
    if columns < first + features:
        raise ValueError(
            f"The gates must be columns {first} to {first + features - 1}, but there "
            f"are {columns} columns. Hand over all of the projection."
        )
    if rows != tokens:
        raise ValueError(
            f"There must be gates of {tokens} tokens, but these are of {rows}. Hand over the "
            "projection of the same tokens, padding too."
        )


@flax.struct.dataclass
class GatedNorm:
    """RMSNorm over heads, with gates (Yang et al. 2024, arXiv 2412.06464).

    Each head is normalised by `rms_norm` with `weight` (float32), then multiplied by `gate` of its
    gates: `silu`, or `sigmoid` in Kimi Delta Attention (arXiv 2510.26692). Everything is in
    float32; the result is rounded to the dtype of `gates`.

    `gates` may be a whole projection. The gates are its columns from `first` on, one per channel in
    the order of the channels; the other columns are not read.
    """

    gates: Float[Array, "tokens columns"]
    weight: Float[Array, " dim"]
    first: int = flax.struct.field(pytree_node=False)
    eps: float = flax.struct.field(pytree_node=False)  # added to the mean square
    gate: Gate = flax.struct.field(pytree_node=False, default="silu")

    def split(self, tokens: int) -> "tuple[GatedNorm, GatedNorm]":
        """Return the norm of the first `tokens` tokens, and the norm of the rest."""
        parts = self.gates[:tokens], self.gates[tokens:]
        first, rest = (dataclasses.replace(self, gates=gates) for gates in parts)
        return first, rest

    def check(self, tokens: int, features: int) -> None:
        """Check that gates and weight match the numbers of tokens and features.

        Raises:
            ValueError: The gates have the wrong number of rows or too few columns, or the length of
                the weight does not divide the features.
        """
        check_gates(self.gates, self.first, tokens, features)
        if features % self.weight.shape[0]:
            raise ValueError(
                f"A norm's weight must be as long as a head, but {features} features are no "
                f"multiple of {self.weight.shape[0]}. Give it one entry for each of a head's."
            )

    def __call__(self, heads: Heads) -> Float[Array, "tokens features"]:
        """Normalise and gate heads in XLA; an input with two axes is gated already: return it."""
        if heads.ndim == 2:
            return heads
        tokens, number, dim = heads.shape
        gates = self.gates[:, self.first : self.first + number * dim].reshape(heads.shape)
        activate = jax.nn.silu if self.gate == "silu" else jax.nn.sigmoid
        gated = rms_norm(heads, self.weight, self.eps) * activate(gates.astype(jnp.float32))
        return gated.reshape(tokens, number * dim).astype(self.gates.dtype)

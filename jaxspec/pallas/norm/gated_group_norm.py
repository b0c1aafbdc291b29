"""The output norm of Mamba2: all heads are gated, then groups of their features are normed."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@flax.struct.dataclass
class GatedGroupNorm:
    """A norm of groups of features, and their gates (Dao and Gu 2024, arXiv 2405.21060).

    With `y` the features of a token, side by side in the order of the heads, and `z` its gates:

        gate_first    rms(y * silu(z)) * weight
        otherwise     rms(y) * weight * silu(z)
        no weight     y * silu(z)

    `rms` divides by the root of the mean square, plus `eps`, over each of `groups` equal parts of
    the features. All of this is float32; the result is rounded to the dtype of `gates`.

    `gates` is the whole projection. The gates are its columns from `first` on; the other columns
    are not read.
    """

    gates: Float[Array, "tokens columns"]
    weight: Float[Array, " features"] | None  # float32; None: there is a gate alone
    first: int = flax.struct.field(pytree_node=False)
    groups: int = flax.struct.field(pytree_node=False)
    eps: float = flax.struct.field(pytree_node=False)
    gate_first: bool = flax.struct.field(pytree_node=False, default=True)

    def split(self, tokens: int) -> "tuple[GatedGroupNorm, GatedGroupNorm]":
        """The norm of the first `tokens`, and the norm of the rest."""
        parts = self.gates[:tokens], self.gates[tokens:]
        first, rest = (dataclasses.replace(self, gates=gates) for gates in parts)
        return first, rest

    def check(self, tokens: int, features: int) -> None:
        """Refuse gates, a weight and groups that do not fit this many tokens of these features.

        Raises:
            ValueError: the gates have other rows or lack columns, the weight has another length, or
                the groups are not equal.
        """
        rows, columns = self.gates.shape
        if columns < self.first + features:
            raise ValueError(
                f"The gates must be columns {self.first} to {self.first + features - 1}, but there "
                f"are {columns} columns. Hand over all of the projection."
            )
        if rows != tokens:
            raise ValueError(
                f"There must be gates of {tokens} tokens, but these are of {rows}. Hand over the "
                "projection of the same tokens, padding too."
            )
        if self.weight is not None and self.weight.shape[0] != features:
            raise ValueError(
                f"The weight must have an entry for each of {features} features, but it has "
                f"{self.weight.shape[0]}. Give it the features of all heads."
            )
        if features % self.groups:
            raise ValueError(
                f"Groups must be equal, but {features} features are no multiple of {self.groups} "
                "groups. Give a number of groups that divides them."
            )

    def __call__(self, heads: Float[Array, "tokens heads dim"]) -> Float[Array, "tokens features"]:
        """The float32 heads normed and gated.

        Raises:
            ValueError: as `check` says.
        """
        tokens, number, dim = heads.shape
        features = number * dim
        self.check(tokens, features)
        y = heads.reshape(tokens, features)
        z = self.gates[:, self.first : self.first + features].astype(jnp.float32)
        gate = jax.nn.silu(z)
        if self.weight is None:
            y = y * gate
        elif self.gate_first:
            y = self._norm(y * gate, self.weight)
        else:
            y = self._norm(y, self.weight) * gate
        return y.astype(self.gates.dtype)

    def _norm(self, y, weight):
        """`rms` of the groups, times the weight."""
        parts = y.reshape(y.shape[0], self.groups, -1)
        root = lax.rsqrt(jnp.mean(parts * parts, axis=2, keepdims=True) + self.eps)
        return (parts * root).reshape(y.shape) * jnp.broadcast_to(weight, y.shape)

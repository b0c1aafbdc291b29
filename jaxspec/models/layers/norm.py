"""Root mean square normalisation, plain and zero-centred."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.layers.linear import Linear, Placement, declare
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.norm.add_norm import add_norm, rms_norm
from jaxspec.pallas.norm.residual import Delta

_Tokens = Float[Array, "tokens features"]


class RMSNorm(nnx.Module):
    """A weight, and what `pallas.add_norm.rms_norm` does with it.

    Qwen3.5 centres all its norms at zero but the output norm of Gated DeltaNet.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, *, zero_centred: bool = False):
        """`dtype`: of the weight; `eps`: added to the mean square."""
        self.eps = eps
        self.zero_centred = zero_centred
        init = jax.nn.initializers.zeros if zero_centred else jax.nn.initializers.ones
        self.weight = declare((size,), dtype, init)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Normalised over the last axis, in the dtype of `x`."""
        return rms_norm(x, self.weight[...], self.eps, zero_centred=self.zero_centred)

    def add(self, x: _Tokens, delta: Delta) -> tuple[_Tokens, _Tokens]:
        """`x + delta` and that normalised, in one kernel on a GPU; without a `delta`, `x` alone."""
        return add_norm(x, delta, self.weight[...], self.eps, zero_centred=self.zero_centred)

    def matmul(
        self, x: _Tokens, delta: Delta, linear: Linear
    ) -> tuple[_Tokens, Float[Array, "tokens outputs"]]:
        """`x + delta`, and all outputs of `linear` for that normalised, side by side.

        Of up to 256 rows these may be kernels, see `norm_matmul`.
        """
        weights = self.weight[...], self.eps, linear.weight[...]
        return norm_matmul(x, delta, *weights, zero_centred=self.zero_centred)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensor."""
        yield Placement(f"{prefix}.weight", self.weight.shape, self.weight)

"""Root mean square normalisation, plain and zero-centred."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.norm.rms_norm import Norm


class RMSNorm(nnx.Module):
    """The weight of an `rms_norm`. `Linear.after_norm` fuses it with a following matmul.

    All norms of Qwen3.5 are zero-centred, except the output norm of Gated DeltaNet.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, *, zero_centred: bool = False):
        self.eps = eps
        self.zero_centred = zero_centred
        init = jax.nn.initializers.zeros if zero_centred else jax.nn.initializers.ones
        self.weight = declare((size,), dtype, init)

    @property
    def operand(self) -> Norm:
        return Norm(self.weight[...], self.eps, self.zero_centred)

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        return self.operand(x)

    def add(self, stream: Stream, pending: Pending) -> tuple[Stream, Stream]:
        """Return `stream + pending` and its norm; one kernel on a GPU (`add_norm`)."""
        return add_norm(stream, pending, self.operand)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield Placement(f"{prefix}.weight", self.weight.shape, self.weight)

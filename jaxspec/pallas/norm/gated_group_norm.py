"""Output norm of Mamba2: gates over all heads, and RMSNorm over groups of their features."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec import parallel
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.norm.gated_norm import check_gates

_DTYPES = jnp.float32, jnp.bfloat16, jnp.float16
_SMALL = 512  # features; fewer than any published model has, and XLA is as fast
_MAX_GROUP = 8192  # a thread keeps 64 features of each of three arrays in registers


@flax.struct.dataclass
class GatedGroupNorm:
    """RMSNorm over groups of features, with gates (Dao and Gu 2024, arXiv 2405.21060).

    With `y` the features of a token, head after head, and `z` its gates, the result is:

        gate_first    rms(y * silu(z)) * weight
        otherwise     rms(y) * weight * silu(z)
        no weight     y * silu(z)

    `rms` divides each of `groups` equal parts of the features by `sqrt(mean square + eps)`. If
    there are fewer groups than devices in a tensor-parallel group, `devices` devices share each.
    Everything is in float32; the result is rounded to the dtype of `gates`.

    `gates` is the whole projection. The gates are its columns from `first` on; the other columns
    are not read.

    One kernel computes this for groups of 128 to 8192 features in multiples of 128; XLA takes two.
    """

    gates: Float[Array, "tokens columns"]
    weight: Float[Array, " features"] | None  # float32; None means gates only
    first: int = flax.struct.field(pytree_node=False)
    groups: int = flax.struct.field(pytree_node=False)
    eps: float = flax.struct.field(pytree_node=False)
    gate_first: bool = flax.struct.field(pytree_node=False, default=True)
    devices: int = flax.struct.field(pytree_node=False, default=1)

    def check(self, tokens: int, features: int) -> None:
        """Check that gates, weight and groups match the numbers of tokens and features.

        Raises:
            ValueError: The gates have the wrong number of rows or too few columns, the weight has
                the wrong length, or the groups would not be equal.
        """
        check_gates(self.gates, self.first, tokens, features)
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
        """Normalise and gate float32 heads.

        Raises:
            ValueError: As in `check`.
        """
        tokens, number, dim = heads.shape
        features = number * dim
        self.check(tokens, features)
        y, why = heads.reshape(tokens, features), _why_not_kernel(self, heads)
        is_small = self.weight is None or features < _SMALL
        if dispatch.runs_kernel("gated_group_norm", why, rows=tokens, by_choice=is_small):
            from jaxspec.pallas.norm.gated_group_norm_kernel import gated_group_norm_kernel

            return gated_group_norm_kernel(self, y)
        return gated_group_norm_reference(self, y)


def gated_group_norm_reference(norm, y):
    z = norm.gates[:, norm.first : norm.first + y.shape[1]].astype(jnp.float32)
    gate, weight = jax.nn.silu(z), norm.weight
    if weight is None:
        y = y * gate
    elif norm.gate_first:
        y = _normed(y * gate, weight, norm)
    else:
        y = _normed(y, weight, norm) * gate
    return y.astype(norm.gates.dtype)


def _normed(y, weight, norm):
    tokens, features = y.shape
    parts = y.reshape(tokens, norm.groups, features // norm.groups)
    square = jnp.mean(parts * parts, axis=2, keepdims=True)
    if norm.devices > 1:
        square = parallel.mean(square, norm.devices)
    root = lax.rsqrt(square + norm.eps)
    return (parts * root).reshape(y.shape) * jnp.broadcast_to(weight, y.shape)


def _why_not_kernel(norm, heads):
    if norm.weight is None:
        return "there is no weight, and XLA makes a gate alone one kernel"
    if norm.devices > 1:
        return f"groups shared by {norm.devices} devices"
    dtypes = heads.dtype, norm.weight.dtype
    if dtypes != (jnp.float32, jnp.float32) or norm.gates.dtype not in _DTYPES:
        return f"heads and weight in {dtypes[0]} and {dtypes[1]}, gates in {norm.gates.dtype}"
    size = heads.shape[1] * heads.shape[2] // norm.groups
    if size % device.THREADS or size > _MAX_GROUP:
        return f"groups of {size} features, no multiple of {device.THREADS} up to {_MAX_GROUP}"
    return None

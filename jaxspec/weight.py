"""Representations of weight matrices, which layers own and pass to every matmul whole.

An op may select its kernel by `type(weight)`, as it does by the number of rows. This happens while
a program is traced, so the compiled program has only the weight's arrays as inputs.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class Dense:
    """A matrix in the dtype of the activations.

    Stored as `[inner, outer]` for `x @ array`, the transpose of the checkpoint's layout.
    """

    array: Float[Array, "inner outer"]

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return self.array.shape[0]

    @property
    def outer(self) -> int:
        """Number of output columns."""
        return self.array.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype

    def columns(self, ids: Int[Array, " ids"]) -> "Dense":
        """Copy the columns `ids` (int32, all in range) to a new weight."""
        return Dense(self.array[:, ids])


@flax.struct.dataclass
class Float8:
    """A matrix in float8_e4m3fn: half the bytes of bfloat16, with 3 mantissa bits.

    Stored as `[outer, inner]`, the 8-bit layout of tensor cores. One power of two scales the whole
    matrix; entries down to 1/8192 of the largest keep all mantissa bits.
    """

    array: Float[Array, "outer inner"]
    scale: Float[Array, ""]  # the weight is `(scale * array).T`

    @staticmethod
    def of(weight: Dense) -> "Float8":
        """Round `weight` to 8 bits, in a copy; all entries may be NaN if one is not finite."""
        return Float8(*_float8_of(weight.array))

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return self.array.shape[1]

    @property
    def outer(self) -> int:
        """Number of output columns."""
        return self.array.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype

    def columns(self, ids: Int[Array, " ids"]) -> "Float8":
        """Copy the columns `ids` (int32, all in range) to a new weight."""
        return Float8(self.array[ids], self.scale)

    def dense(self) -> Dense:
        """Return the weight in float32."""
        return Dense(self.scale * self.array.T.astype(jnp.float32))


@flax.struct.dataclass
class DenseExperts:
    """One matrix per expert of a layer, in the dtype of the activations.

    Stored as `[outer, inner]`, the checkpoint's layout, which the kernels read without a transpose.
    """

    array: Float[Array, "experts outer inner"]

    @property
    def num_experts(self) -> int:
        """Number of experts, including the slices of a shared expert."""
        return self.array.shape[0]

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return self.array.shape[2]

    @property
    def outer(self) -> int:
        """Number of output columns."""
        return self.array.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype


Weight = Dense | Float8


def to_float8(
    array: Float[Array, "..."], axis: int | None = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return `array` in float8_e4m3fn and its scale, a power of two, per array or along `axis`.

    The largest number is scaled to 128 to 256; the format's maximum is 448. A number that is not
    finite becomes NaN, and all numbers with the same scale may do so.
    """
    numbers = array.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(numbers), axis, keepdims=axis is not None))
    scale = jnp.ldexp(jnp.float32(1), exponent - 8)
    return (numbers / scale).astype(jnp.float8_e4m3fn), scale


@jax.jit  # one kernel each for scale and bytes, without temporaries of the array's size
def _float8_of(array):
    transposed, scale = to_float8(array.T)
    return transposed, scale

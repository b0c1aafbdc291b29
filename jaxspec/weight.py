"""How weights are held: a layer keeps them, and every product takes them whole.

An op may choose its kernel by `type(weight)`, as it does by the number of rows. The choice is made
while a program is traced, so the program has the weight's arrays alone.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class Dense:
    """One matrix in the dtype of the activations.

    Published matrices are `[outer, inner]`; this is the transpose, as `x @ array` wants it.
    """

    array: Float[Array, "inner outer"]

    @property
    def inner(self) -> int:
        """Features that a product sums over."""
        return self.array.shape[0]

    @property
    def outer(self) -> int:
        """Columns of the product."""
        return self.array.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix."""
        return self.array.dtype

    def columns(self, ids: Int[Array, " ids"]) -> "Dense":
        """A weight of these columns alone, copied; each of `ids` (int32) must be in range."""
        return Dense(self.array[:, ids])


@flax.struct.dataclass
class Float8:
    """One matrix in float8_e4m3fn: half the bytes of 16 bits, and 3 bits behind the point.

    It is `[outer, inner]`, as tensor cores want bytes. The scale is a power of two, and one for all
    entries: those down to an 8,000th of the largest keep all their bits, whatever their column.
    """

    array: Float[Array, "outer inner"]
    scale: Float[Array, ""]  # the weight is `scale * array`, transposed

    @staticmethod
    def of(weight: Dense) -> "Float8":
        """The nearest to `weight`, copied; of one that is not finite it may be NaN everywhere."""
        return Float8(*_float8_of(weight.array))

    @property
    def inner(self) -> int:
        """Features that a product sums over."""
        return self.array.shape[1]

    @property
    def outer(self) -> int:
        """Columns of the product."""
        return self.array.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix."""
        return self.array.dtype

    def columns(self, ids: Int[Array, " ids"]) -> "Float8":
        """A weight of these columns alone, copied; each of `ids` (int32) must be in range."""
        return Float8(self.array[ids], self.scale)

    def dense(self) -> Dense:
        """The weight in float32."""
        return Dense(self.scale * self.array.T.astype(jnp.float32))


@flax.struct.dataclass
class DenseExperts:
    """One matrix for each expert of a layer, in the dtype of the activations.

    They are `[outer, inner]`, as published: the kernels read them so, and nothing is transposed.
    """

    array: Float[Array, "experts outer inner"]

    @property
    def num_experts(self) -> int:
        """Experts, those that every token has among them."""
        return self.array.shape[0]

    @property
    def inner(self) -> int:
        """Features that a product sums over."""
        return self.array.shape[2]

    @property
    def outer(self) -> int:
        """Columns of the product."""
        return self.array.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrices."""
        return self.array.dtype


Weight = Dense | Float8


def to_float8(
    array: Float[Array, "..."], axis: int | None = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`array` in float8_e4m3fn, and its scale: a power of two, for all of it or along `axis`.

    The largest number becomes one from 128 to 256; the format ends at 448. What is not finite
    becomes NaN, and so may what has the same scale.
    """
    numbers = array.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(numbers), axis, keepdims=axis is not None))
    scale = jnp.ldexp(jnp.float32(1), exponent - 8)
    return (numbers / scale).astype(jnp.float8_e4m3fn), scale


@jax.jit  # one kernel each for the scale and the bytes: nothing of the array's size in between
def _float8_of(array):
    transposed, scale = to_float8(array.T)
    return transposed, scale

"""How weights are held: a layer keeps them, and every product takes them whole.

An op may choose its kernel by `type(weight)`, as it does by the number of rows. The choice is made
while a program is traced, so the program has the weight's arrays alone.
"""

import flax.struct
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


Weight = Dense  # becomes a union with the first quantised kind

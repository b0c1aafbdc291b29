"""How the weight of a linear layer is held: `Linear` keeps it, and every product takes it whole.

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


Weight = Dense  # becomes a union with the first quantised kind

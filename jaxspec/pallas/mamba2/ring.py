"""Replay ring of Mamba2: the factors that each token leaves in its slot."""

import flax.struct
from jaxtyping import Array, Float


@flax.struct.dataclass
class Mamba2Ring:
    """Factors of each token's update of the state: `dt x B^T` after a decay by `exp(A dt)`.

    `recurrent.replay` defines the order of the rows. `x` and `b` have the dtype of the replay base.
    """

    x: Float[Array, "layers slots ring heads head_dim"]
    b: Float[Array, "layers slots ring groups state_dim"]
    dt: Float[Array, "layers slots ring heads"]  # float32
    window: int = flax.struct.field(pytree_node=False)  # tokens kept between steps

    @property
    def num_rows(self) -> int:
        """Rows per slot: the window, and one for each token of the widest step."""
        return self.x.shape[2]

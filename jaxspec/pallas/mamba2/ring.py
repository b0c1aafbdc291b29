"""What a token of Mamba2 leaves in the ring of its slot."""

import flax.struct
from jaxtyping import Array, Float


@flax.struct.dataclass
class Mamba2Ring:
    """What each token added to its slot's state: `dt x B^T` after a decay of `A dt`.

    `recurrent.replay` says which row is whose. `x` and `b` have the checkpoint's dtype.
    """

    x: Float[Array, "layers slots ring heads head_dim"]
    b: Float[Array, "layers slots ring groups state_dim"]
    dt: Float[Array, "layers slots ring heads"]  # float32
    window: int = flax.struct.field(pytree_node=False)  # tokens kept between steps

    @property
    def num_rows(self) -> int:
        """Rows of a slot: the window, and one for each token of the widest step."""
        return self.x.shape[2]

"""Replay ring of Gated DeltaNet."""

import flax.struct
from jaxtyping import Array, Float

States = Float[Array, "layers slots 1 value_heads value_dim key_dim"]


@flax.struct.dataclass
class GdnRing:
    """Factors that each token added to its slot's state: `u k^T`, after a decay of `g`.

    `recurrent.replay` defines the row of each token. `k` and `u` have the replay base's dtype.
    """

    k: Float[Array, "layers slots ring key_heads key_dim"]
    u: Float[Array, "layers slots ring value_heads value_dim"]
    g: Float[Array, "layers slots ring value_heads"]  # float32, log decay
    window: int = flax.struct.field(pytree_node=False)  # tokens kept between steps

    @property
    def num_rows(self) -> int:
        """Rows per slot: the window, and one for each token of the widest step."""
        return self.k.shape[2]

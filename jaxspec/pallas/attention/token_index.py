"""TokenIndex: the selection of the earlier tokens that a token attends to (DeepSeek-V3.2)."""

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.paging.kv_write import VectorPool


@flax.struct.dataclass
class TokenIndex:
    """Operands that score earlier tokens for each query; each query attends to the best `top_k`.

    DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1. The score of a token is the sum over index heads
    of `weights * relu(queries . key)`, in float32.
    """

    queries: Float[Array, "*tokens index_heads index_dim"]
    weights: Float[Array, "*tokens index_heads"]  # float32
    keys: VectorPool  # as `vector_write` stored them
    top_k: int = flax.struct.field(pytree_node=False)

    def of_tokens(self, change: Callable[[Array], Array]) -> "TokenIndex":
        """Return the index for other tokens, whose operands `change` returns."""
        return TokenIndex(change(self.queries), change(self.weights), self.keys, self.top_k)

    def selected(
        self, layer: int, pages: Int[Array, "rows pages"], sees: Bool[Array, "rows width context"]
    ) -> Bool[Array, "rows width context"]:
        """Return which of the visible tokens are attended to; the earlier ones among equals.

        `pages` are indices into the pool, and `sees` are the tokens that causal attention sees. No
        more than `top_k` tokens are all selected, whatever their scores.
        """
        context = sees.shape[2]
        if context <= self.top_k:
            return sees
        keys = self.keys[layer, pages].reshape(len(pages), context, self.keys.shape[3])
        products = jnp.einsum(
            "rwhd,rcd->rwhc",
            self.queries,
            keys.astype(self.queries.dtype),
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        scores = jnp.einsum(
            "rwh,rwhc->rwc", self.weights, jnp.maximum(products, 0), precision="highest"
        )
        _, best = lax.top_k(jnp.where(sees, scores, -jnp.inf), self.top_k)
        none = jnp.zeros(sees.shape, jnp.bool_)
        return sees & jnp.put_along_axis(none, best, True, axis=2, inplace=False)

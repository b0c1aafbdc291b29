"""TokenIndex: the selection of the earlier tokens that a token attends to (DeepSeek-V3.2)."""

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.paged import why_not_page_size
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
        self, layer: int, pages: Int[Array, "rows pages"], newest: Int[Array, "rows width"]
    ) -> Bool[Array, "rows width context"]:
        """Return which tokens are attended to: all that a token sees, or the `best` of them.

        Arguments are those of `index_scores`.
        """
        context = pages.shape[1] * self.keys.shape[2]
        sees = visible(newest, context)
        if context <= self.top_k:
            return sees
        none = jnp.zeros(sees.shape, jnp.bool_)
        best = self.best(index_scores_reference(self, layer, pages, newest))
        return sees & jnp.put_along_axis(none, best, True, axis=2, inplace=False)

    def best(self, scores: Float[Array, "rows width context"]) -> Int[Array, "rows width top_k"]:
        """Return the positions of the best scores; the earlier ones among equals.

        Positions that a token does not see follow those that it sees.

        Args:
            scores: From `index_scores`, of more than `top_k` positions.
        """
        # `top_k` sorts -0.0 before 0.0; which of them a sum of zeros is depends on its order.
        scores = jnp.where(scores == 0, 0.0, scores)
        return lax.top_k(scores, self.top_k)[1]


def index_scores(
    index: TokenIndex,
    layer: int,
    pages: Int[Array, "rows pages"],
    newest: Int[Array, "rows width"],
) -> Float[Array, "rows width context"]:
    """Return the scores of all positions, -inf for those that a token does not see.

    Args:
        index: The index, over `[rows, width]` tokens.
        layer: The layer of the keys.
        pages: Pages of each row; indices into the pool.
        newest: Last position that a token sees, -1 for padding.
    """
    why = _why_not_kernel(index)
    if not dispatch.runs_kernel("index_scores", why, rows=newest.size):
        return index_scores_reference(index, layer, pages, newest)
    from jaxspec.pallas.attention.index_scores_kernel import index_scores_kernel

    length = jnp.max(newest, axis=1) + 1
    operands = dispatch.layer_index(index.keys, layer), pages, length
    scores = index_scores_kernel(index.queries, index.weights, index.keys, *operands)
    return jnp.where(visible(newest, scores.shape[2]), scores, -jnp.inf)


def index_scores_reference(index, layer, pages, newest):
    """Reference for `index_scores`: gather every page of the row, multiply, add up the heads."""
    keys = index.keys[layer, pages]
    keys = keys.reshape(len(pages), keys.shape[1] * keys.shape[2], keys.shape[3])
    products = jnp.einsum(
        "rwhd,rcd->rwhc",
        index.queries,
        keys.astype(index.queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    scores = jnp.einsum(
        "rwh,rwhc->rwc", index.weights, jnp.maximum(products, 0), precision="highest"
    )
    return jnp.where(visible(newest, keys.shape[1]), scores, -jnp.inf)


def _why_not_kernel(index):
    heads, dim = index.queries.shape[-2:]
    if index.queries.dtype != jnp.bfloat16 or index.keys.dtype != jnp.bfloat16:
        return f"queries in {index.queries.dtype} over {index.keys.dtype}, not bfloat16"
    if heads % 16 or heads > 128 or dim not in (64, 128):
        return f"{heads} index heads of {dim} features"
    return why_not_page_size(index.keys.shape[2])


def visible(newest: Int[Array, "rows width"], context: int) -> Bool[Array, "rows width context"]:
    """Return which positions each token sees, from its last one."""
    return jnp.arange(context, dtype=jnp.int32)[None, None, :] <= newest[:, :, None]

"""TokenIndexer: scores earlier tokens, so that latent attention reads only the best ones."""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, PagedVectors, Pools
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE, whole
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.models.layers.rope import rotate_halves
from jaxspec.pallas.attention.inputs import Rotation
from jaxspec.pallas.attention.token_index import TokenIndex
from jaxspec.pallas.paging.kv_write import vector_write

_EPS = 1e-6  # of the keys' norm
_TOP_K = whole(1, 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class TokenIndexConfig:
    """Sizes of a token index: a part of a `ModelConfig`."""

    heads: int
    head_dim: int
    top_k: int  # tokens that each token attends to

    @classmethod
    def read(cls, fields: Fields) -> "TokenIndexConfig":
        """Read the sizes from DeepSeek-V3.2's fields."""
        heads, head_dim = (fields.need(f"index_{n}", SIZE) for n in ("n_heads", "head_dim"))
        return cls(heads, head_dim, fields.need("index_topk", _TOP_K))


@flax.struct.dataclass
class IndexTokens:
    """Queries of the index, and the weights of its heads."""

    queries: Float[Array, "tokens index_heads index_dim"]
    weights: Float[Array, "tokens index_heads"]  # float32


class TokenIndexer(nnx.Module):
    """Queries from the latent of the attention's queries, one key per token, weights of heads.

    All devices of a group hold all heads: a token's selection is that of all of them.
    """

    pool = "index"

    def __init__(self, sizes: TokenIndexConfig, query_rank: int, dtype: jnp.dtype):
        """Declare the parameters; `outputs` are columns of the attention's projection."""
        self.sizes = sizes
        self.queries = Linear(query_rank, {"wq_b": sizes.heads * sizes.head_dim}, dtype)
        initializers = jax.nn.initializers
        self.norm = declare((sizes.head_dim,), dtype, initializers.ones)
        self.shift = declare((sizes.head_dim,), dtype, initializers.zeros)

    @staticmethod
    def outputs(sizes: TokenIndexConfig) -> dict[str, int]:
        """Return the columns of keys and weights in the projection of the normed stream."""
        return {"indexer.wk": sizes.head_dim, "indexer.weights_proj": sizes.heads}

    def cache_spec(self, options: CacheOptions) -> PagedVectors:
        """Return one layer of the keys' pool, in the dtype of the model."""
        return PagedVectors(self.pool, 1, self.sizes.head_dim, options.dtype)

    def prepare(
        self,
        latents: Float[Array, "tokens query_rank"],
        keys: Float[Array, "tokens index_dim"],
        weights: Float[Array, "tokens index_heads"],
        turns: Rotation,
        pools: Pools,
        layer: int,
        kv_slots: Array,
    ) -> tuple[IndexTokens, Pools]:
        """Compute queries and weights, and write the keys of all tokens to their pages."""
        heads, head_dim = self.sizes.heads, self.sizes.head_dim
        queries = self.queries.joined(latents).reshape(len(keys), heads, head_dim)
        keys = rotate_halves(self._normed(keys)[:, None], turns)[:, 0]
        pool = vector_write(pools[self.pool], layer, keys, kv_slots)
        # Both factors may be applied after the ReLU, as they are positive.
        weights = weights.astype(jnp.float32) * (heads * head_dim) ** -0.5
        tokens = IndexTokens(rotate_halves(queries, turns), weights)
        return tokens, pools | {self.pool: pool}

    def operand(self, tokens: IndexTokens, pools: Pools) -> TokenIndex:
        return TokenIndex(tokens.queries, tokens.weights, pools[self.pool], self.sizes.top_k)

    def _normed(self, keys: Array) -> Array:
        """Layer normalisation, in float32."""
        x = keys.astype(jnp.float32)
        x = x - jnp.mean(x, axis=1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + _EPS)
        norm, shift = (each[...].astype(jnp.float32)[None] for each in (self.norm, self.shift))
        return (x * norm + shift).astype(keys.dtype)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "indexer."
        yield from self.queries.checkpoint(prefix)
        for name, param in (("weight", self.norm), ("bias", self.shift)):
            yield Placement(f"{prefix}k_norm.{name}", param.shape, param)

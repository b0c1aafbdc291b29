"""LatentAttention: attention whose keys and values are projections of one latent per token."""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, PagedVectors, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import SIZE
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.models.layers.rope import rotate_pairs
from jaxspec.models.layers.token_indexer import IndexTokens, TokenIndexConfig, TokenIndexer
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.attention.latent import latent_attention, latent_prefill_attention
from jaxspec.pallas.attention.token_index import TokenIndex
from jaxspec.pallas.gpu.device import ALIGNED_COLUMNS
from jaxspec.pallas.norm.residual import Pending
from jaxspec.pallas.paging.kv_write import vector_write
from jaxspec.regions import DecodeRegion

_Heads = Float[Array, "tokens heads rank"]  # sums of latents, one per head


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """Sizes of latent attention: a part of a `ModelConfig`, which has the number of heads."""

    query_rank: int | None  # features of the queries' latent; None means a direct projection
    rank: int  # features of the latent of keys and values
    plain_dim: int  # channels per head of queries and keys that are not rotated
    shared_dim: int  # channels of queries per head, and of the key that all heads share
    value_dim: int  # channels per head of values
    scale: float  # factor of scores
    eps: float = 1e-6  # of the latents' norms
    gated: bool = False  # each head has a gate for its output

    @classmethod
    def read(
        cls, fields: Fields, *, growth: float = 1.0, gated: bool = False
    ) -> "LatentAttentionConfig":
        """Read the sizes from DeepSeek's fields.

        Args:
            fields: The entries of config.json.
            growth: Factor of the scores in addition to that of the size of a head.
            gated: True if each head has a gate for its output.
        """
        plain, shared = (fields.need(f"qk_{n}_head_dim", SIZE) for n in ("nope", "rope"))
        return cls(
            query_rank=fields.find("q_lora_rank", SIZE),
            rank=fields.need("kv_lora_rank", SIZE),
            plain_dim=plain,
            shared_dim=shared,
            value_dim=fields.need("v_head_dim", SIZE),
            scale=growth * (plain + shared) ** -0.5,
            gated=gated,
        )

    @property
    def query_dim(self) -> int:
        """Channels per head of queries."""
        return self.plain_dim + self.shared_dim

    @property
    def width(self) -> int:
        """Features that are cached per token."""
        return self.rank + self.shared_dim


@flax.struct.dataclass
class LatentTokens:
    """Queries of tokens whose latents and shared keys are already written to their pages."""

    queries: Float[Array, "tokens heads width"]  # in the latents' features
    index: IndexTokens | None
    gates: Float[Array, "tokens heads"] | None  # before the sigmoid; None means no gates


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with rotary positions or none.

    The projections of a latent to keys and values of each head are applied to queries and outputs,
    so all heads attend to the same cached vector: the latent, then a key of `shared_dim` channels,
    which is the part with positions. With a `TokenIndexConfig`, each token attends only to the
    tokens that a token index selects. With gates (Ling-3.0), the output of each head is multiplied
    by the sigmoid of a number.
    """

    pool = "latent"

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.sizes, self.heads = sizes, heads = config.part(LatentAttentionConfig), config.num_heads
        index, queries = config.find_part(TokenIndexConfig), heads * sizes.query_dim
        rank = sizes.query_rank
        outputs = {"q_proj": queries} if rank is None else {"q_a_proj": rank}
        outputs |= {"kv_a_proj_with_mqa": sizes.width}
        if index is not None:
            outputs |= TokenIndexer.outputs(index)
        if sizes.gated:
            outputs |= {"g_proj": heads}
        # Aligned, so that blocks of FP8 scales start where an output does; the weights of index
        # heads, and gates, are published in 16 bits.
        self.inputs = Linear(
            config.hidden_size,
            outputs,
            dtype,
            align=ALIGNED_COLUMNS,
            in_16_bits=(index is not None) + sizes.gated,
        )
        # None without a latent of queries, which an index needs.
        self.query_norm = None if rank is None else RMSNorm(rank, sizes.eps, dtype)
        self.queries = None if rank is None else Linear(rank, {"q_b_proj": queries}, dtype)
        self.indexer: TokenIndexer | None = nnx.data(None)
        if rank is not None and index is not None:
            self.indexer = nnx.data(TokenIndexer(index, rank, dtype))
        self.latent_norm = RMSNorm(sizes.rank, sizes.eps, dtype)
        self.keys_up = declare((heads * sizes.plain_dim, sizes.rank), dtype)
        self.values_up = declare((heads * sizes.value_dim, sizes.rank), dtype)
        self.out = Linear(heads * sizes.value_dim, {"o_proj": config.hidden_size}, dtype)

    @property
    def projection(self) -> Linear:
        """Queries or their latent, the latent of keys and values, and columns of the index."""
        return self.inputs

    def cache_specs(self, options: CacheOptions) -> tuple[PagedVectors, ...]:
        latents = PagedVectors(self.pool, 1, self.sizes.width, options.kv_dtype)
        return (latents,) if self.indexer is None else (latents, self.indexer.cache_spec(options))

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[LatentTokens, Pools]:
        """Compute queries, and write the latents and keys of all tokens to their pages."""
        sizes, turns, kv_slots = self.sizes, inputs.rotation, inputs.step.kv_slots
        queries, kv, *others = self.inputs.split(projected)
        gates = others.pop() if sizes.gated else None
        index = None
        if self.query_norm is not None and self.queries is not None:
            latents = self.query_norm(queries)
            queries = self.queries.joined(latents)
            if self.indexer is not None:
                assert turns is not None
                keys, weights = others
                operands = latents, keys, weights, turns
                index, pools = self.indexer.prepare(*operands, pools, layer, kv_slots)
        queries = queries.reshape(len(queries), self.heads, sizes.query_dim)
        plain, rotated = jnp.split(queries, [sizes.plain_dim], axis=2)
        latent, key = self.latent_norm(kv[:, : sizes.rank]), kv[:, sizes.rank :]
        if turns is not None:
            rotated = rotate_pairs(rotated, turns)
            key = rotate_pairs(key[:, None], turns)[:, 0]
        vectors = jnp.concatenate([latent, key], axis=1)
        pool = vector_write(pools[self.pool], layer, vectors, kv_slots)
        up = self.keys_up[...].reshape(self.heads, sizes.plain_dim, sizes.rank)
        plain = jnp.einsum("thd,hdr->thr", plain, up)
        queries = jnp.concatenate([plain, rotated], axis=2)
        return LatentTokens(queries, index, gates), pools | {self.pool: pool}

    def decode(
        self, tokens: LatentTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Heads, Pools]:
        """Attend from each row's tokens to the row's pages; the pools are unchanged."""
        rows, count = inputs.decode, len(tokens.queries)
        num_rows = rows.slots.shape[0]

        def rectangle(x: Array) -> Array:
            return x.reshape(num_rows, inputs.width, *x.shape[1:])

        index = self._index(tokens, pools)
        if index is not None:
            index = index.of_tokens(rectangle)
        heads = latent_attention(
            rectangle(tokens.queries),
            pools[self.pool],
            layer,
            inputs.page_tables,
            rows,
            value_dim=self.sizes.rank,
            scale=self.sizes.scale,
            index=index,
        )
        return heads.reshape(count, self.heads, self.sizes.rank), pools

    def prefill(
        self, tokens: LatentTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Heads, Pools]:
        """Attend from each chunk's tokens to the sequence's pages; the pools are unchanged."""
        chunks = inputs.prefill
        assert chunks is not None
        heads = latent_prefill_attention(
            tokens.queries,
            pools[self.pool],
            layer,
            inputs.page_tables,
            chunks,
            value_dim=self.sizes.rank,
            scale=self.sizes.scale,
            index=self._index(tokens, pools),
        )
        return heads, pools

    def _index(self, tokens: LatentTokens, pools: Pools) -> TokenIndex | None:
        if self.indexer is None or tokens.index is None:
            return None
        return self.indexer.operand(tokens.index, pools)

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        return {}

    def finish(self, heads: _Heads, tokens: LatentTokens) -> _Heads:
        """Return the heads, which need no conversion."""
        return heads

    def output(self, heads: _Heads, tokens: LatentTokens) -> Pending:
        up = self.values_up[...].reshape(self.heads, self.sizes.value_dim, self.sizes.rank)
        values = jnp.einsum("thr,hvr->thv", heads, up)
        if tokens.gates is not None:
            gates = jax.nn.sigmoid(tokens.gates.astype(jnp.float32))
            values = values * gates[:, :, None].astype(values.dtype)
        return self.out.pending(values.reshape(len(heads), self.out.in_features))

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        prefix += "self_attn."
        yield from self.inputs.checkpoint(prefix)
        if self.query_norm is not None and self.queries is not None:
            yield from self.query_norm.checkpoint(prefix + "q_a_layernorm")
            yield from self.queries.checkpoint(prefix)
        yield from self.latent_norm.checkpoint(prefix + "kv_a_layernorm")
        # The tensor has keys, then values, of one head after the other.
        channels, rank = self.sizes.plain_dim + self.sizes.value_dim, self.sizes.rank
        rows = np.arange(self.heads * channels).reshape(self.heads, channels)
        for part, param in zip(
            np.split(rows, [self.sizes.plain_dim], axis=1),
            (self.keys_up, self.values_up),
            strict=True,
        ):
            name = prefix + "kv_b_proj.weight"
            yield Placement(name, (rows.size, rank), param, part=part.ravel())
        yield from self.out.checkpoint(prefix)
        if self.indexer is not None:
            yield from self.indexer.checkpoint(prefix)

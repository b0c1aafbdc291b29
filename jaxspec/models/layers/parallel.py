"""Parallel: attention and Mamba2 side by side, the token mixer of Falcon-H1."""

from collections.abc import Iterator

import flax.struct
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.attention import Attention, AttentionTokens
from jaxspec.models.layers.linear import Linear, side_by_side, summed
from jaxspec.models.layers.mamba2 import Mamba2
from jaxspec.models.layers.mixer import LayerInputs, Projected
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.norm.residual import Pending
from jaxspec.regions import DecodeRegion

_Finished = Float[Array, "tokens features"]


@flax.struct.dataclass
class ParallelTokens:
    mamba: Projected
    attention: AttentionTokens


class Parallel(nnx.Module):
    """The sum of the outputs of Mamba2 and attention for the same normed stream.

    Zuo et al. 2025, "Falcon-H1", arXiv 2507.22448. One matmul projects for both, and one sums both
    outputs. Each mixer has its pool; the two pools have equally many layers.
    """

    pool = Mamba2.pool

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.mamba, self.attention = Mamba2(config, dtype), Attention(config, dtype)
        self.in_proj = side_by_side((self.mamba.in_proj, self.attention.qkv))
        self.out_proj = summed((self.mamba.out_proj, self.attention.out))

    @property
    def projection(self) -> Linear:
        """Mamba2's projection, then queries, keys and values."""
        return self.in_proj

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        return *self.mamba.cache_specs(options), *self.attention.cache_specs(options)

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[ParallelTokens, Pools]:
        of_mamba, of_attention = self.in_proj.split(projected)
        of_mamba, pools = self.mamba.prepare(of_mamba, inputs, pools, layer)
        attended, pools = self.attention.prepare(of_attention, inputs, pools, layer)
        return ParallelTokens(of_mamba, attended), pools

    def decode(
        self, tokens: ParallelTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Finished, Pools]:
        """Return the finished heads of both mixers, side by side."""
        mixed, pools = self.mamba.decode(tokens.mamba, inputs, pools, layer)
        attended, pools = self.attention.decode(tokens.attention, inputs, pools, layer)
        return _joined(self.mamba.finish(mixed, tokens.mamba), attended), pools

    def prefill(
        self, tokens: ParallelTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Finished, Pools]:
        """Return the finished heads of both mixers, side by side."""
        mixed, pools = self.mamba.prefill(tokens.mamba, inputs, pools, layer)
        attended, pools = self.attention.prefill(tokens.attention, inputs, pools, layer)
        return _joined(mixed, attended), pools

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        return self.mamba.states(pools, rows, layer)

    def finish(self, heads: _Finished, tokens: ParallelTokens) -> _Finished:
        """Return the heads, which `decode` has finished."""
        return heads

    def output(self, heads: _Finished, tokens: ParallelTokens) -> Pending:
        """Return the sum of both output projections."""
        return self.out_proj.pending(heads)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        yield from self.mamba.checkpoint(prefix)
        yield from self.attention.checkpoint(prefix)


def _joined(mixed: _Finished, attended: Float[Array, "tokens heads head_dim"]) -> _Finished:
    """Concatenate the features of both mixers in the order of the rows of `summed`."""
    tokens, heads, head_dim = attended.shape
    return jnp.concatenate([mixed, attended.reshape(tokens, heads * head_dim)], axis=1)

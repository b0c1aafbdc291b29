"""Parallel: attention and Mamba2 side by side, the token mixer of Falcon-H1."""

from collections.abc import Iterator

import flax.struct
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.attention import Attention, AttentionTokens
from jaxspec.models.layers.joined import side_by_side, summed
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mamba2 import Mamba2
from jaxspec.models.layers.mixer import LayerInputs
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.norm.residual import Pending
from jaxspec.regions import DecodeRegion

_Finished = Float[Array, "tokens features"]


@flax.struct.dataclass
class ParallelTokens:
    """What each of the two mixers reads of a token."""

    mamba: Float[Array, "tokens columns"]  # its projection
    attention: AttentionTokens


class Parallel(nnx.Module):
    """The sum of what Mamba2 and attention make of the same normed stream.

    Zuo et al. 2025, "Falcon-H1", arXiv 2507.22448. One product projects for both, and one adds what
    both give. Each has a pool of its own, of as many layers as the other's.
    """

    pool = Mamba2.pool

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        """`dtype`: of the weights."""
        self.mamba, self.attention = Mamba2(config, dtype), Attention(config, dtype)
        self.in_proj = side_by_side((self.mamba.in_proj, self.attention.qkv))
        self.out_proj = summed((self.mamba.out_proj, self.attention.out))

    @property
    def projection(self) -> Linear:
        """Mamba2's projection, and behind it queries, keys and values."""
        return self.in_proj

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """What each of the two keeps."""
        return *self.mamba.cache_specs(options), *self.attention.cache_specs(options)

    def prepare(
        self,
        projected: Float[Array, "tokens columns"],
        inputs: LayerInputs,
        pools: Pools,
        layer: int,
    ) -> tuple[ParallelTokens, Pools]:
        """Each mixer prepares its own columns."""
        of_mamba, of_attention = self.in_proj.split(projected)
        of_mamba, pools = self.mamba.prepare(of_mamba, inputs, pools, layer)
        attended, pools = self.attention.prepare(of_attention, inputs, pools, layer)
        return ParallelTokens(of_mamba, attended), pools

    def decode(
        self, tokens: ParallelTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Finished, Pools]:
        """The finished heads of both, side by side."""
        mixed, pools = self.mamba.decode(tokens.mamba, inputs, pools, layer)
        attended, pools = self.attention.decode(tokens.attention, inputs, pools, layer)
        return _joined(self.mamba.finish(mixed, tokens.mamba), attended), pools

    def prefill(
        self, tokens: ParallelTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[_Finished, Pools]:
        """As `decode`, of the chunks."""
        mixed, pools = self.mamba.prefill(tokens.mamba, inputs, pools, layer)
        attended, pools = self.attention.prefill(tokens.attention, inputs, pools, layer)
        return _joined(mixed, attended), pools

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        """Those of Mamba2."""
        return self.mamba.states(pools, rows, layer)

    def finish(self, heads: _Finished, tokens: ParallelTokens) -> _Finished:
        """The heads themselves: `decode` has finished them."""
        return heads

    def output(self, heads: _Finished, tokens: ParallelTokens) -> Pending:
        """The sum of both output projections."""
        return self.out_proj.pending(heads)

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors of both."""
        yield from self.mamba.checkpoint(prefix)
        yield from self.attention.checkpoint(prefix)


def _joined(mixed: _Finished, attended: Float[Array, "tokens heads head_dim"]) -> _Finished:
    """The features of both as `summed` has their rows."""
    tokens, heads, head_dim = attended.shape
    return jnp.concatenate([mixed, attended.reshape(tokens, heads * head_dim)], axis=1)

"""RecurrentMixer: base of the token mixers with a causal convolution and a recurrent state."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.cache import CacheOptions, Conv, PerSlot, Pools, Recurrent, RecurrentPool, Ring
from jaxspec.models.layers.linear import Linear
from jaxspec.models.layers.mixer import LayerInputs, Projected, flat
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.pallas.norm.gated_norm import Heads
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion

Finished = Float[Array, "tokens features"]
MixerTokens = Any  # the projection of each token, or what `prepare` returns in its place


class RecurrentMixer(nnx.Module):
    """Input projection, causal convolution, recurrence, gated norm, output projection.

    This class decides which operation computes a region and what it stores in the pool. A subclass
    declares `in_proj`, `conv` `[taps, channels]` and what follows them, and calls its operations in
    the abstract methods. These return the new arrays of the pool in the order of its fields.
    """

    pool = "recurrent"
    in_proj: Linear
    conv: Any  # an `nnx.Param`

    @property
    def projection(self) -> Linear:
        """The input projection, whose first columns are the channels of the convolution."""
        return self.in_proj

    @property
    @abc.abstractmethod
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of each part of the convolution; devices share the parts one by one."""

    def cache_specs(self, options: CacheOptions) -> tuple[Recurrent]:
        """Return the spec of states, convolution inputs and ring entries of a layer."""
        state, ring = self.cached(options.state_dtype)
        conv = Conv(self.conv.shape[0], self.conv_parts, options.dtype)
        return (Recurrent(self.pool, 1, conv, state, ring, options.states),)

    def prepare(
        self, projected: Projected, inputs: LayerInputs, pools: Pools, layer: int
    ) -> tuple[MixerTokens, Pools]:
        """Return the projection unchanged: each region's operation starts with the convolution."""
        return projected, pools

    def decode(
        self, projected: MixerTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Heads, Pools]:
        """Compute the rectangle's heads with `step` or `replay`, as the state policy selects.

        Those of a `TokenRegion` are computed one token of a slot after the other.
        """
        pool, rows = pools[self.pool], inputs.decode
        if isinstance(rows, TokenRegion):
            heads, conv, states = self.scan_heads(projected, pool, rows, layer)
            pool = dataclasses.replace(pool, conv=conv, states=states)
        else:
            heads, pool = pool.policy.decode(self, projected, pool, rows, layer)
        return heads, pools | {self.pool: pool}

    def step(
        self, projected: MixerTokens, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Heads, RecurrentPool]:
        """Compute the rectangle's heads under the snapshot policy, which stores every state."""
        heads, conv, states = self.step_heads(projected, pool, rows, layer)
        return flat(heads), dataclasses.replace(pool, conv=conv, states=states)

    def replay(
        self, projected: MixerTokens, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Heads, RecurrentPool]:
        """Compute the rectangle's heads under the replay policy, which stores updates in a ring."""
        heads, conv, states, ring = self.replay_heads(projected, pool, rows, layer)
        return flat(heads), dataclasses.replace(pool, conv=conv, states=states, ring=ring)

    def prefill(
        self, projected: MixerTokens, inputs: ModelInputs, pools: Pools, layer: int
    ) -> tuple[Finished, Pools]:
        """Compute the chunks' normed heads; store the state at the end of each chunk."""
        chunks, pool = inputs.prefill, pools[self.pool]
        assert chunks is not None
        heads, conv, states = self.prefill_heads(projected, pool, chunks, layer)
        pools = pools | {self.pool: dataclasses.replace(pool, conv=conv, states=states)}
        return self.finish(heads, projected), pools

    def states(self, pools: Pools, rows: DecodeRegion, layer: int) -> dict[str, Array]:
        pool = pools[self.pool]
        return {self.pool: pool.policy.states(self, pool, rows, layer)}

    def finish(self, heads: Heads, projected: MixerTokens) -> Finished:
        """Gate and norm the heads, unless `replay`'s kernel has done so."""
        return self.output_norm(projected)(heads)

    @abc.abstractmethod
    def cached(self, dtype: jnp.dtype) -> tuple[PerSlot, Ring]:
        """Return a slot's state and its ring; states and their factors have this dtype."""

    @abc.abstractmethod
    def step_heads(
        self, projected: MixerTokens, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        """Return heads `[rows, width, ...]`, convolution inputs and states."""

    @abc.abstractmethod
    def replay_heads(
        self, projected: MixerTokens, pool: RecurrentPool, rows: DecodeRegion, layer: int
    ) -> tuple[Array, Array, Array, Any]:
        """Return heads `[rows, width, ...]`, convolution inputs, states and ring."""

    @abc.abstractmethod
    def scan_heads(
        self, projected: MixerTokens, pool: RecurrentPool, rows: TokenRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        """Return heads `[tokens, ...]`, convolution inputs and states."""

    @abc.abstractmethod
    def prefill_heads(
        self, projected: MixerTokens, pool: RecurrentPool, chunks: PrefillRegion, layer: int
    ) -> tuple[Array, Array, Array]:
        """Return heads `[tokens, ...]`, convolution inputs and states."""

    @abc.abstractmethod
    def replayed(self, pool: RecurrentPool, rows: DecodeRegion, layer: int) -> Array:
        """Return each row's state: the slot's with the ring's tokens added."""

    @abc.abstractmethod
    def output_norm(self, projected: MixerTokens) -> Callable[[Heads], Finished]:
        """Return the gated norm of these tokens' heads."""

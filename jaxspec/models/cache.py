"""HybridCache: paged keys and values for attention, 1 + K states a slot for recurrent layers."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What a model keeps between steps, as sizes. Zero layers of a kind means none is kept."""

    kv_layers: int  # attention layers, the draft head's included (it comes last)
    kv_heads: int
    head_dim: int
    state_layers: int  # recurrent layers
    state_shape: tuple[int, int, int]  # value heads, value dim, key dim
    conv_dim: int  # channels of the causal convolution
    conv_kernel: int  # its taps


@flax.struct.dataclass
class HybridCache:
    """Pools that never move; a step writes them in place (they are donated).

    Slot 0 and page 0 are null: padding may point there and nothing reads what it leaves.
    """

    kv: Float[Array, "kv_layers 2 pages page_size kv_heads head_dim"]  # keys, values
    conv: Float[Array, "state_layers slots window conv_dim"]  # window = conv_kernel - 1 + drafts
    states: Float[Array, "state_layers slots candidates value_heads value_dim key_dim"]

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.kv.shape[3]


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """How much of each the engine keeps. Null page and null slot are counted in."""

    num_pages: int
    page_size: int
    num_slots: int
    num_drafts: int  # K: a slot holds 1 + K candidate states


def init_cache(
    shape: CacheShape, sizes: CacheSizes, dtype: jnp.dtype, state_dtype: jnp.dtype
) -> HybridCache:
    """An empty cache, all zeros: recurrent states in `state_dtype`, the rest in `dtype`."""
    kv = (shape.kv_layers, 2, sizes.num_pages, sizes.page_size, shape.kv_heads, shape.head_dim)
    window = max(shape.conv_kernel - 1, 0) + sizes.num_drafts
    conv = (shape.state_layers, sizes.num_slots, window, shape.conv_dim)
    states = (shape.state_layers, sizes.num_slots, 1 + sizes.num_drafts, *shape.state_shape)
    return HybridCache(
        kv=jnp.zeros(kv, dtype), conv=jnp.zeros(conv, dtype), states=jnp.zeros(states, state_dtype)
    )


def fork_slots(
    cache: HybridCache,
    source_slots: Int[Array, " forks"],
    target_slots: Int[Array, " forks"],
    source_pages: Int[Array, " forks"],
    target_pages: Int[Array, " forks"],
) -> HybridCache:
    """Copy recurrent states, convolution windows and one page each from source to target.

    Target 0 means no copy: writes to the null slot and null page are dropped.
    """
    num_slots, num_pages = cache.states.shape[1], cache.kv.shape[2]
    slots = jnp.where(target_slots > 0, target_slots, num_slots)
    pages = jnp.where(target_pages > 0, target_pages, num_pages)
    return HybridCache(
        kv=cache.kv.at[:, :, pages].set(cache.kv[:, :, source_pages], mode="drop"),
        conv=cache.conv.at[:, slots].set(cache.conv[:, source_slots], mode="drop"),
        states=cache.states.at[:, slots].set(cache.states[:, source_slots], mode="drop"),
    )

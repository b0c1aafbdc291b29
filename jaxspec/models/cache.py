"""HybridCache: paged keys and values for attention, states by slot for recurrent layers."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.gated_delta.replay import GdnRing


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What a model keeps between steps, as sizes. Zero layers of a kind means none is kept."""

    kv_layers: int  # attention layers, the draft head's included (it comes last)
    kv_heads: int
    head_dim: int
    state_layers: int  # recurrent layers
    state_shape: tuple[int, int, int]  # value heads, value dim, key dim
    state_key_heads: int
    conv_dim: int  # channels of the causal convolution
    conv_kernel: int  # its taps


@flax.struct.dataclass
class HybridCache:
    """Pools that never move; a step writes them in place (they are donated).

    Slot 0 and page 0 are null: padding may point there and nothing reads what it leaves. A slot's
    recurrent state is one of its candidates, or, where there is a ring, candidate 0 with the newest
    tokens of the ring added.
    """

    kv: Float[Array, "kv_layers 2 pages page_size kv_heads head_dim"]  # keys, values
    conv: Float[Array, "state_layers slots window conv_dim"]  # ring of inputs: `conv_update`
    states: Float[Array, "state_layers slots candidates value_heads value_dim key_dim"]
    ring: GdnRing | None  # None: a step keeps the state after each of its tokens

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.kv.shape[3]

    @property
    def ring_window(self) -> int:
        """Tokens that the ring keeps between steps; 0: there is no ring."""
        return 0 if self.ring is None else self.ring.window


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """How much of each the engine keeps. Null page and null slot are counted in."""

    num_pages: int
    page_size: int
    num_slots: int
    num_drafts: int  # K
    ring_window: int = 0  # tokens that a ring keeps; 0: a slot holds 1 + K candidate states


def kv_dtype_of(word: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """What keys and values are kept in when the user says `word`; None: `dtype`, the model's.

    Raises:
        ValueError: another word.
    """
    if word not in (None, "bfloat16", "float8_e4m3fn"):
        raise ValueError(
            f"kv_dtype must be 'bfloat16', 'float8_e4m3fn' or None, the model's, got {word!r}."
        )
    return dtype if word is None else jnp.dtype(word)


def init_cache(
    shape: CacheShape,
    sizes: CacheSizes,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype,
    kv_dtype: jnp.dtype | None = None,
) -> HybridCache:
    """An empty cache, all zeros: recurrent states in `state_dtype`, the rest in `dtype`, keys and
    values in `kv_dtype` if given."""
    kv = (shape.kv_layers, 2, sizes.num_pages, sizes.page_size, shape.kv_heads, shape.head_dim)
    window = shape.conv_kernel + sizes.num_drafts  # read, and written by the same step
    conv = (shape.state_layers, sizes.num_slots, window, shape.conv_dim)
    candidates = 1 if sizes.ring_window else 1 + sizes.num_drafts
    states = (shape.state_layers, sizes.num_slots, candidates, *shape.state_shape)
    return HybridCache(
        kv=jnp.zeros(kv, kv_dtype or dtype),
        conv=jnp.zeros(conv, dtype),
        states=jnp.zeros(states, state_dtype),
        ring=_init_ring(shape, sizes, state_dtype) if sizes.ring_window else None,
    )


def _init_ring(shape: CacheShape, sizes: CacheSizes, dtype: jnp.dtype) -> GdnRing:
    value_heads, value_dim, key_dim = shape.state_shape
    # Behind the window a row for each of the 1 + K tokens of the widest step.
    ring = (shape.state_layers, sizes.num_slots, sizes.ring_window + 1 + sizes.num_drafts)
    return GdnRing(
        k=jnp.zeros((*ring, shape.state_key_heads, key_dim), dtype),
        u=jnp.zeros((*ring, value_heads, value_dim), dtype),
        g=jnp.zeros((*ring, value_heads), jnp.float32),
        window=sizes.ring_window,
    )


def fork_slots(
    cache: HybridCache,
    source_slots: Int[Array, " forks"],
    target_slots: Int[Array, " forks"],
    source_pages: Int[Array, " forks"],
    target_pages: Int[Array, " forks"],
) -> HybridCache:
    """Copy recurrent states, convolution inputs and one page each from source to target.

    Target 0 means no copy: writes to the null slot and null page are dropped. A fork comes
    before its leader decodes: the prefill left nothing in the ring.
    """
    num_slots, num_pages = cache.states.shape[1], cache.kv.shape[2]
    slots = jnp.where(target_slots > 0, target_slots, num_slots)
    pages = jnp.where(target_pages > 0, target_pages, num_pages)
    return dataclasses.replace(
        cache,
        kv=cache.kv.at[:, :, pages].set(cache.kv[:, :, source_pages], mode="drop"),
        conv=cache.conv.at[:, slots].set(cache.conv[:, source_slots], mode="drop"),
        states=cache.states.at[:, slots].set(cache.states[:, source_slots], mode="drop"),
    )

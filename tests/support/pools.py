"""One small pool of each kind, for tests of what is kept and copied."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import (
    CacheSpec,
    Conv,
    HiddenStates,
    PagedKV,
    PerSlot,
    PoolSizes,
    Recurrent,
    Ring,
    ShortConv,
    Snapshot,
    TokenHistory,
)
from jaxspec.pallas.gated_delta.heads import GdnRing

F32 = jnp.dtype("float32")
SIZES = PoolSizes(num_pages=3, page_size=2, num_slots=4, width=3)
KV, HISTORY = PagedKV("kv", 1, 1, 4, F32), TokenHistory()
HIDDEN = HiddenStates(features=8, dtype=F32)
GDN = Ring(GdnRing, (PerSlot((1, 4), F32), PerSlot((2, 3), F32), PerSlot((2,), F32)))
CONVS = ShortConv("short_conv", 2, taps=3, channels=5, dtype=F32)


def recurrent(policy=Snapshot()):  # noqa: B008
    return Recurrent("recurrent", 2, Conv(4, (2, 3), F32), PerSlot((2, 3, 4), F32), GDN, policy)


class Strange(CacheSpec):
    """A kind of pool that jaxspec does not have, which says nothing of how it is stored."""

    def allocate(self, sizes):
        return jnp.zeros((self.layers, sizes.num_pages))

    def copy(self, pool, moves):
        return pool


class StrangePages(Strange):
    """One that copies its own pages, and does not say where they are."""

    by_page = True


def random_like(tree, seed):
    """The pool with numbers in place of zeros."""
    leaves, structure = jax.tree.flatten(tree)
    random = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [jnp.asarray(random.random(x.shape, "f")) for x in leaves])

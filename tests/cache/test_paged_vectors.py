"""PagedVectors: pages of one vector per token."""

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import MEMORY_LABELS, Moves, PagedVectors, PoolSizes, allocate, merged
from jaxspec.cache.portable import pages_of, token_arrays

SIZES = PoolSizes(num_pages=5, page_size=4, num_slots=2, width=1)
SPEC = PagedVectors("latent", 3, 6, jnp.dtype("float32"))


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def test_a_page_is_copied_in_all_layers():
    pool = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4, 6)), jnp.float32)
    assert SPEC.allocate(SIZES).shape == pool.shape
    moved = SPEC.copy(pool, Moves(int32(), int32(), int32(2, 1), int32(4, 0)))
    np.testing.assert_array_equal(moved, pool.at[:, 4].set(pool[:, 2]))


def test_its_tokens_leave_and_enter_pages_of_another_size():
    pool = np.random.default_rng(1).normal(size=(3, 5, 4, 6)).astype(np.float32)
    pages = {"latent": np.moveaxis(pool[:, [3, 1]], 1, 0)}
    arrays = token_arrays([SPEC], pages, 7)
    np.testing.assert_array_equal(arrays["latent"][5], pool[:, 1, 1])
    wide = PoolSizes(num_pages=5, page_size=8, num_slots=2, width=1)
    entered = pages_of([SPEC], arrays, 7, wide)
    np.testing.assert_array_equal(token_arrays([SPEC], entered, 7)["latent"], arrays["latent"])


def test_pools_of_latents_and_of_index_keys_are_apart_and_have_labels():
    index = PagedVectors("index", 1, 2, jnp.dtype("float32"))
    specs = merged([SPEC, index, SPEC, index])
    assert [(each.name, each.layers) for each in specs] == [("latent", 6), ("index", 2)]
    assert allocate(specs, SIZES).keys() <= MEMORY_LABELS.keys()

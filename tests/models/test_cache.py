"""Forking copies exactly what a sample needs of its leader, and padding copies nothing."""

import chex
import jax.numpy as jnp
import numpy as np

from jaxspec.models.cache import CacheShape, CacheSizes, fork_slots, init_cache

SHAPE = CacheShape(2, 1, 4, 3, (2, 3, 4), 5, 4)
SIZES = CacheSizes(num_pages=6, page_size=2, num_slots=5, num_drafts=3)


def filled_cache():
    cache = init_cache(SHAPE, SIZES, jnp.dtype("float32"), jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    fill = {name: jnp.asarray(rng.normal(size=x.shape), x.dtype) for name, x in vars(cache).items()}
    return type(cache)(**fill)


def test_a_fork_copies_states_windows_and_one_page():
    cache = filled_cache()
    want = {name: np.array(pool) for name, pool in vars(cache).items()}
    for source, target, source_page, target_page in [(1, 3, 2, 5), (1, 4, 0, 0)]:
        want["states"][:, target] = want["states"][:, source]
        want["conv"][:, target] = want["conv"][:, source]
        if target_page:
            want["kv"][:, :, target_page] = want["kv"][:, :, source_page]
    index = [jnp.array(x, jnp.int32) for x in ([1, 1, 0], [3, 4, 0], [2, 0, 0], [5, 0, 0])]
    chex.assert_trees_all_equal(vars(fork_slots(cache, *index)), want)

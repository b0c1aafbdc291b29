"""What a cache holds; forking copies what a sample needs of its leader, padding copies nothing."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.cache import CacheShape, CacheSizes, fork_slots, init_cache, kv_dtype_of

SHAPE = CacheShape(2, 1, 4, 3, (2, 3, 4), 1, 5, 4)
SIZES = CacheSizes(num_pages=6, page_size=2, num_slots=5, num_drafts=3)


def filled_cache():
    cache = init_cache(SHAPE, SIZES, jnp.dtype("float32"), jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)


def test_a_ring_takes_the_place_of_all_candidates_but_one():
    states, dtypes = (2, 3, 4), (jnp.dtype("bfloat16"), jnp.dtype("float16"))
    cache = init_cache(SHAPE, SIZES, *dtypes)
    assert cache.states.shape == (3, 5, 4, *states) and cache.ring is None and not cache.ring_window
    cache = init_cache(SHAPE, dataclasses.replace(SIZES, ring_window=16), *dtypes)
    assert cache.states.shape == (3, 5, 1, *states) and cache.ring_window == 16
    assert cache.ring.k.shape == (3, 5, 20, 1, 4) and cache.ring.u.shape == (3, 5, 20, 2, 3)
    assert cache.ring.g.shape == (3, 5, 20, 2) and cache.ring.g.dtype == jnp.float32
    assert {cache.states.dtype, cache.ring.k.dtype, cache.ring.u.dtype} == {dtypes[1]}


def test_keys_and_values_may_have_a_dtype_of_their_own():
    dtype = jnp.dtype("bfloat16")
    caches = [
        init_cache(SHAPE, SIZES, dtype, dtype, kv_dtype_of(word, dtype))
        for word in (None, "float8_e4m3fn")
    ]
    assert caches[0].kv.dtype == dtype and caches[1].conv.dtype == dtype
    assert caches[0].kv.nbytes == 2 * caches[1].kv.nbytes


def test_a_fork_needs_nothing_of_the_ring():
    sizes = dataclasses.replace(SIZES, ring_window=16)
    cache = init_cache(SHAPE, sizes, jnp.dtype("float32"), jnp.dtype("float32"))
    one = jnp.ones(1, jnp.int32)
    full = jax.tree.map(jnp.ones_like, cache)
    forked = fork_slots(full.replace(ring=cache.ring), one, 2 * one, one, 2 * one)
    chex.assert_trees_all_equal(forked.ring, cache.ring)


def test_a_fork_copies_states_inputs_and_one_page():
    cache = filled_cache()
    want = {name: np.array(getattr(cache, name)) for name in ("kv", "conv", "states")}
    for source, target, source_page, target_page in [(1, 3, 2, 5), (1, 4, 0, 0)]:
        want["states"][:, target] = want["states"][:, source]
        want["conv"][:, target] = want["conv"][:, source]
        if target_page:
            want["kv"][:, :, target_page] = want["kv"][:, :, source_page]
    index = [jnp.array(x, jnp.int32) for x in ([1, 1, 0], [3, 4, 0], [2, 0, 0], [5, 0, 0])]
    forked = fork_slots(cache, *index)
    assert forked.ring is None
    chex.assert_trees_all_equal({name: getattr(forked, name) for name in want}, want)

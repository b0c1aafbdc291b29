"""The keys and values that a slot holds of layers with a sliding window."""

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import MEMORY_LABELS, Moves, PoolSizes, WindowKV

SPEC = WindowKV("window_kv", 2, window=6, heads=3, head_dim=4, dtype=jnp.dtype("bfloat16"))
SIZES = PoolSizes(num_pages=6, page_size=2, num_slots=4, width=4)


def test_there_is_room_for_a_window_and_a_steps_tokens_however_long_requests_are():
    for num_pages in (2, 10**6):
        sizes = PoolSizes(num_pages, page_size=2, num_slots=4, width=4)
        pool = SPEC.allocate(sizes)
        # 5 positions and a step's 4, whose first page has up to 15 before them.
        assert pool.shape == (2, 4, 32, 2, 3, 4) and pool.dtype == jnp.bfloat16


def test_a_copied_slot_has_its_keys_and_padding_copies_nothing():
    none = jnp.zeros(2, jnp.int32)
    pool = jnp.arange(2.0 * 4 * 9 * 24).reshape(2, 4, 9, 2, 3, 4)
    copied = SPEC.copy(pool, Moves(jnp.array([1, 2]), jnp.array([3, 0]), none, none))
    np.testing.assert_array_equal(copied, pool.at[:, 3].set(pool[:, 1]))


def test_memory_reports_have_words_for_it():
    assert SPEC.holders(SPEC.allocate(SIZES)).keys() <= MEMORY_LABELS.keys()

"""What a slot keeps for a convolution that has no state besides its inputs."""

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import MEMORY_LABELS, Moves, PoolSizes, ShortConv

SPEC = ShortConv("short_conv", 2, taps=3, channels=5, dtype=jnp.dtype("bfloat16"))
SIZES = PoolSizes(num_pages=6, page_size=2, num_slots=4, width=4)


def test_there_is_room_for_the_taps_and_a_steps_tokens():
    pool = SPEC.allocate(SIZES)
    assert pool.shape == (2, 4, 2 + 4, 5) and pool.dtype == jnp.bfloat16


def test_a_copied_slot_has_its_inputs_and_padding_copies_nothing():
    none, pool = jnp.zeros(2, jnp.int32), jnp.arange(2 * 4 * 6 * 5.0).reshape(2, 4, 6, 5)
    copied = SPEC.copy(pool, Moves(jnp.array([1, 2]), jnp.array([3, 0]), none, none))
    np.testing.assert_array_equal(copied, pool.at[:, 3].set(pool[:, 1]))


def test_people_are_told_what_it_holds():
    pool = SPEC.allocate(SIZES)
    assert SPEC.holders(pool).keys() <= MEMORY_LABELS.keys()

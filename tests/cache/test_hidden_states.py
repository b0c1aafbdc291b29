import jax.numpy as jnp
import numpy as np

from jaxspec.cache import MEMORY_LABELS, HiddenStates, Moves, PoolSizes

SPEC = HiddenStates(features=2, dtype=jnp.dtype("bfloat16"))


def test_states_lie_in_the_pages_of_their_request_and_nowhere_else():
    pool = SPEC.allocate(PoolSizes(num_pages=4, page_size=3, num_slots=3, width=1))
    states = jnp.array([[60, 61], [70, 71], [99, 99], [110, 111]], jnp.float32)
    pool = SPEC.write(pool, jnp.array([6, 7, -1, 11]), states)
    assert pool.dtype == jnp.bfloat16
    want = np.zeros((4, 3, 2))
    want[2, :2], want[3, 2] = [[60, 61], [70, 71]], [110, 111]
    np.testing.assert_array_equal(pool.astype(jnp.float32), want)


def test_a_copied_page_has_its_states_and_padding_copies_nothing():
    none, pool = jnp.zeros(1, jnp.int32), jnp.arange(24).reshape(4, 3, 2)
    moves = Moves(none, none, jnp.array([1, 2]), jnp.array([3, 0]))
    np.testing.assert_array_equal(SPEC.copy(pool, moves), pool.at[3].set(pool[1]))


def test_people_are_told_what_it_holds():
    pool = SPEC.allocate(PoolSizes(num_pages=4, page_size=3, num_slots=3, width=1))
    assert SPEC.holders(pool).keys() <= MEMORY_LABELS.keys()

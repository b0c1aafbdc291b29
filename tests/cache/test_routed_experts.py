import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import MEMORY_LABELS, Moves, PoolSizes, RoutedExperts

SPEC = RoutedExperts(layers=2, top_k=3, num_experts=256)
SIZES = PoolSizes(num_pages=4, page_size=3, num_slots=3, width=1)


def test_experts_are_in_the_pages_of_their_request_and_nowhere_else():
    experts = np.random.default_rng(0).integers(0, 256, (2, 4, 3)).astype(np.int32)
    pools = {SPEC.name: SPEC.allocate(SIZES), "kv": None}
    pools = SPEC.write(pools, jnp.array([6, 7, -1, 11]), [jnp.asarray(each) for each in experts])
    want = np.zeros((12, 2, 3))
    want[[6, 7, 11]] = experts[:, [0, 1, 3]].swapaxes(0, 1)
    np.testing.assert_array_equal(pools[SPEC.name], want.reshape(4, 3, 2, 3))


def test_a_copied_page_has_its_experts_and_padding_copies_nothing():
    none, pool = jnp.zeros(1, jnp.int32), jnp.arange(72).reshape(4, 3, 2, 3)
    moves = Moves(none, none, jnp.array([1, 2]), jnp.array([3, 0]))
    np.testing.assert_array_equal(SPEC.copy(pool, moves), pool.at[3].set(pool[1]))


@pytest.mark.parametrize("count, dtype", [(256, np.uint8), (257, np.uint16), (4096, np.uint16)])
def test_an_expert_takes_a_byte_if_all_numbers_fit(count, dtype):
    pool = RoutedExperts(layers=2, top_k=3, num_experts=count).allocate(SIZES)
    assert pool.dtype == dtype and SPEC.holders(pool).keys() <= MEMORY_LABELS.keys()

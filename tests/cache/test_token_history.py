import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Moves, PoolSizes, TokenHistory


def test_tokens_lie_in_the_pages_of_their_request_and_nowhere_else():
    spec = TokenHistory()
    pool = spec.allocate(PoolSizes(num_pages=4, page_size=3, num_slots=3, width=1))
    pool = spec.write(pool, jnp.array([6, 7, -1, 11]), jnp.array([60, 70, 99, 110]))
    np.testing.assert_array_equal(pool, [[0] * 3, [0] * 3, [60, 70, 0], [0, 0, 110]])
    tables = jnp.array([[0, 0], [2, 3], [3, 0]])
    read = spec.read(pool, tables, jnp.array([1, 2]))
    np.testing.assert_array_equal(read, [[60, 70, 0, 0, 0, 110], [0, 0, 110, 0, 0, 0]])
    places = jnp.array([[1, 5, 6], [2, 0, 99]])  # the last ones lie behind all pages
    some = spec.read_at(pool, tables, jnp.array([1, 2]), places)
    np.testing.assert_array_equal(some[:, :2], [[70, 110], [110, 0]])


def test_a_copied_page_has_its_tokens_and_padding_copies_nothing():
    spec, none = TokenHistory(), jnp.zeros(1, jnp.int32)
    pool = jnp.arange(12).reshape(4, 3)
    moves = Moves(none, none, jnp.array([1, 2]), jnp.array([3, 0]))
    np.testing.assert_array_equal(spec.copy(pool, moves), pool.at[3].set(pool[1]))

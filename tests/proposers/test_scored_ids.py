import jax.numpy as jnp
import numpy as np

from jaxspec.proposers.scored_ids import ids_at, over_all_ids

IDS = jnp.asarray([2, 3, 7], jnp.int32)


def test_an_index_becomes_its_id_and_none_stays_none():
    np.testing.assert_array_equal(ids_at(jnp.asarray([2, -1, 0]), IDS), [7, -1, 2])


def test_what_is_never_drafted_has_no_probability():
    scores = over_all_ids(jnp.asarray([[0.5, -1.0, 2.0]]), IDS, 9)
    none = -np.inf
    expected = [[none, none, 0.5, -1.0, none, none, none, 2.0, none]]
    np.testing.assert_array_equal(scores, expected)

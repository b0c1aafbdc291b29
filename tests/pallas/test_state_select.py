"""state_select against indexing by hand."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pallas.state_select import state_select


def test_the_state_after_the_last_accepted_token_is_kept():
    states = np.random.default_rng(0).normal(size=(2, 5, 4, 3, 2)).astype(np.float32)
    slots, offset = np.array([3, 1, 4], np.int32), np.array([0, 3, 2], np.int32)
    actual = state_select(jnp.asarray(states), 1, jnp.asarray(slots), jnp.asarray(offset))
    np.testing.assert_array_equal(actual, states[1, slots, offset])


def test_garbage_indices_are_clamped():
    states = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    slots, offset = np.array([10**6, -7, 2], np.int32), np.array([-1, 2, 99], np.int32)
    actual = state_select(jnp.asarray(states), 0, jnp.asarray(slots), jnp.asarray(offset))
    np.testing.assert_array_equal(actual, states[0, [4, 0, 2], [0, 2, 3]])

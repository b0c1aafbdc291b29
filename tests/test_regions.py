"""Which rows and chunks are live, and which of their tokens are real."""

import jax.numpy as jnp
import numpy as np

from jaxspec.regions import DecodeRegion, PrefillRegion, real_tokens


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def test_padding_rows_are_not_live():
    """The null slot, a slot that no pool has, and a row without tokens."""
    zeros = jnp.zeros(5, jnp.int32)
    rows = DecodeRegion(int32(1, 0, 4, -1, 2), zeros, int32(2, 2, 2, 2, 0), zeros, zeros)
    np.testing.assert_array_equal(rows.is_live(4), [True, False, False, False, False])


def test_chunks_know_their_lengths():
    zeros = jnp.zeros(3, jnp.int32)
    chunks = PrefillRegion(int32(3, 1, 0), zeros, int32(0, 5, 5, 7), zeros)
    np.testing.assert_array_equal(chunks.query_len, [5, 0, 2])
    np.testing.assert_array_equal(chunks.is_live(4), [True, False, False])


def test_the_first_tokens_of_a_row_are_real():
    real = real_tokens(int32(0, 1, 3), 3)
    np.testing.assert_array_equal(real, [[0, 0, 0], [1, 0, 0], [1, 1, 1]])

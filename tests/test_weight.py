"""A Dense weight is its array, and costs a program nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.weight import Dense

ARRAY = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)


def test_it_has_the_sizes_of_its_array():
    weight = Dense(ARRAY)
    assert (weight.inner, weight.outer, weight.dtype) == (3, 4, jnp.float32)


def test_columns_are_a_weight_of_their_own():
    part = Dense(ARRAY).columns(jnp.asarray([3, 1, 1]))
    np.testing.assert_array_equal(part.array, ARRAY[:, [3, 1, 1]])


def test_a_program_gets_the_array_alone():
    def product(x, weight):
        return x @ weight.array

    typed = jax.make_jaxpr(product)(jnp.ones((2, 3)), Dense(ARRAY))
    plain = jax.make_jaxpr(lambda x, weight: x @ weight)(jnp.ones((2, 3)), ARRAY)
    assert str(typed) == str(plain)

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.runner.programs import XLA_OPTIONS, program_cache

X = np.float32([1.0078125, 3.140625]).astype(jnp.bfloat16)
SQUARES = np.float32(np.float32(X) ** 2).astype(jnp.bfloat16).astype(np.float32)


def squares(x):
    return (x * x).astype(jnp.float32)


def test_a_rounding_to_16_bits_is_kept():
    """Without the options XLA drops it, so that this test would fail."""
    np.testing.assert_array_equal(jax.jit(squares, compiler_options=XLA_OPTIONS)(X), SQUARES)
    assert (np.asarray(jax.jit(squares)(X)) != SQUARES).any()


def test_a_program_from_disk_is_compiled_with_the_options():
    content = program_cache.traced(jax.jit(squares), (X,), "cpu")
    results = jax.tree.structure([0])
    options = {"compiler_options": XLA_OPTIONS}
    program = program_cache._jitted(content, squares, (X,), results, options)
    np.testing.assert_array_equal(program(X)[0], SQUARES)

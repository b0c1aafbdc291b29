import jax
import jax.numpy as jnp
import pytest

from jaxspec.pallas.selection.parts import why_not_kernel


@pytest.mark.parametrize(
    ("vocab", "dtype", "why"),
    [
        (248_320, jnp.float32, None),
        (248_322, jnp.float32, "248,322 ids in float32"),
        (508, jnp.float32, "508 ids in float32"),
        (4096, jnp.bfloat16, "4,096 ids in bfloat16"),
    ],
)
def test_the_kernel_takes_float32_rows_of_whole_vectors(vocab, dtype, why):
    assert why_not_kernel(jax.ShapeDtypeStruct((4, vocab), dtype)) == why

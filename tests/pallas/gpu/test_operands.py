"""What XLA hands to a kernel begins where the kernel can read it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sm90 import array, compile_for, operand_starts

from jaxspec.pallas.gpu import device

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("columns", [64, 128, 192])
def test_rows_keep_their_values(columns):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, columns)), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(lambda x: device.aligned(x[1:]))(x), x[1:])


@pytest.mark.parametrize("columns", [1088, 1152, 1216])
def test_rows_from_anywhere_begin_at_a_multiple_or_are_copied(h200, monkeypatch, columns):
    """Without the copy XLA would hand them on where they are."""
    from jaxspec.pallas.matmul.gemm_kernel import gemm_kernel

    dims = (67, columns), (columns, 128)
    x, weight = (array(*each, dtype=jnp.bfloat16) for each in dims)

    def starts(cut):
        def step(x, weight):
            return gemm_kernel(cut(x + x), weight)

        return operand_starts(compile_for(h200, monkeypatch, step, (x, weight)).as_text())

    assert starts(lambda x: x[3:]) == [3 * 2 * columns]
    aligned = starts(lambda x: device.aligned(x[3:]))
    assert aligned == ([] if columns % device.ALIGNED_COLUMNS else [3 * 2 * columns])

"""Steps that the blocks of `paged_attention` share, in the interpreter."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from races import assert_no_races

from jaxspec.pallas.gpu import access, tensor_cores

ROWS, DIM = 16, 128


@pytest.mark.parametrize("factor", [None, 0.75])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_copied_rows_are_multiplied_whatever_the_dtypes(interpreter, dtype, factor):
    from jaxspec.pallas.attention.paged_block import copy_rows

    sizes = SimpleNamespace(pages=SimpleNamespace(head_dim=DIM), query_rows=ROWS)

    def body(x, y, *, rows, tile, filled):
        plgpu.copy_gmem_to_smem(x, rows, filled)
        plgpu.barrier_wait(filled)
        copy_rows(sizes, rows, tile, factor)
        plgpu.copy_smem_to_gmem(tile, y)
        plgpu.wait_smem_to_gmem(0)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, DIM)), jnp.bfloat16)
    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, dtype),
        scratch_types={
            "rows": plgpu.SMEM((ROWS, DIM), x.dtype),
            "tile": tensor_cores.tile(ROWS, DIM, dtype=dtype),
            "filled": plgpu.Barrier(),
        },
        compiler_params=access.EXPLICIT_BARRIERS,
        interpret=interpreter,
    )(x)
    assert_no_races()
    expected = (x.astype(jnp.float32) * (1 if factor is None else factor)).astype(dtype)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (y, expected)))

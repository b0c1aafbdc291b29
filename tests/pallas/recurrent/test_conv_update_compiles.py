"""conv_update's kernel compiles to sm_90a code that neither spills nor copies the pool."""

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN
from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.conv_update import conv_update
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_the_kernel_compiles(h200, monkeypatch, capfd, shape, dtype, width):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(x, taps, conv, rows):
        for layer in range(2):
            x, conv = conv_update(x, taps, conv, layer, rows)
        return x, conv

    num_rows, channels = 4, shape.conv_dim
    x, taps = array(num_rows, width, channels, dtype=dtype), array(4, channels, dtype=dtype)
    pool = array(2, 65, 12, channels, dtype=dtype)
    rows = DecodeRegion(*[array(num_rows, dtype=jnp.int32)] * 5)
    compiled = compile_for(h200, monkeypatch, step, (x, taps, pool, rows), donated=2)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "transpose(" not in compiled.as_text()

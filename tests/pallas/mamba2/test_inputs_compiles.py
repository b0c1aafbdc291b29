"""mamba2_inputs' kernel compiles to sm_90a code that reads the projection where it lies."""

import re

import jax.numpy as jnp
import pytest
from mamba2 import heads_of
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas.mamba2.heads import Mamba2Params
from jaxspec.pallas.mamba2.inputs_kernel import mamba2_inputs_kernel
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user

SHAPES = [*MAMBA2.values(), Mamba2Shape(48, 1), Mamba2Shape(128, 8, head_dim=80)]


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_compiles(h200, monkeypatch, capfd, shape, dtype, width):
    def step(projected, params, conv, rows):
        outputs = []
        for layer in range(2):
            tokens, conv = mamba2_inputs_kernel(projected, params, conv, jnp.int32(layer), rows)
            outputs.append(tokens)
        return outputs, conv

    num_rows, channels = 4, shape.conv_dim
    projected = array(num_rows, width, shape.projected, dtype=dtype)
    taps, bias = array(4, channels, dtype=dtype), array(channels, dtype=dtype)
    params = Mamba2Params(taps, bias, array(shape.heads, 3), heads_of(shape))
    pool = array(2, 65, 12, channels, dtype=dtype)
    rows = DecodeRegion(*[array(num_rows, dtype=jnp.int32)] * 5)
    compiled = compile_for(h200, monkeypatch, step, (projected, params, pool, rows), donated=2)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())  # no columns cut out

"""gdn_inputs' kernel compiles to sm_90a code that reads the projection where it lies."""

import re

import jax.numpy as jnp
import pytest
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas.gated_delta.heads import GdnHeads
from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_kernel
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(8, 16, 64, 64)], ids=str)
def test_the_kernel_compiles(h200, monkeypatch, capfd, shape, dtype, width):
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)

    def step(projected, taps, decay, conv, rows):
        outputs = []
        for layer in range(2):
            operands = projected, taps, decay, conv, jnp.int32(layer), rows, heads
            tokens, conv = gdn_inputs_kernel(*operands)
            outputs.append(tokens)
        return outputs, conv

    num_rows, channels = 4, shape.conv_dim
    columns = channels + shape.value_heads * (shape.value_dim + 2)
    projected = array(num_rows, width, columns, dtype=dtype)
    taps, pool = array(4, channels, dtype=dtype), array(2, 65, 12, channels, dtype=dtype)
    rows = DecodeRegion(*[array(num_rows, dtype=jnp.int32)] * 5)
    operands = (projected, taps, array(shape.value_heads, 2), pool, rows)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=3)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert not re.findall(r"(slice|fusion)\(", compiled.as_text())  # no columns cut out

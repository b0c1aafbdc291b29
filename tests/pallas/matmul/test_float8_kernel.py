"""The kernels for published weights in 8 bits, against float64 in the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import gated_norm
from products import check
from published_8bit import (
    SCALE_BUGS,
    assert_is_product,
    blocks_of,
    dequantised,
    dequantised_rows,
    gated_heads_of,
    rows_of,
    rows_with_nan,
)
from races import assert_no_races

from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8 import Float8Tiling
from jaxspec.pallas.matmul.float8_terms import as_multiplied


@pytest.mark.parametrize(
    ("tokens", "inner", "outers", "tiling"),
    [
        (1, 512, (64,), Float8Tiling(8, 1)),
        (3, 1536, (192, 192), Float8Tiling(8, 2)),  # parts end in half a block
        (8, 2560, (64,), Float8Tiling(8, 3)),  # parts of 6 or 7 chunks
        (13, 512, (64, 64), Float8Tiling(16, 1)),
    ],
)
@pytest.mark.parametrize("terms", [2, 1])
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outers, tiling, terms
):
    from jaxspec.pallas.matmul.float8_kernel import split_matmul_kernel

    x, (weight, parts) = rows_with_nan(tokens, inner), blocks_of(inner, *outers)
    weight = dataclasses.replace(weight, terms=terms)
    y = split_matmul_kernel(x, weight, tiling=tiling, interpret=interpreter)
    assert y.dtype == (jnp.float32 if tiling.parts > 1 else jnp.bfloat16)
    assert_is_product(y, as_multiplied(x, weight), dequantised(parts))
    assert_no_races()


def test_the_ring_is_refilled(monkeypatch, interpreter):
    from jaxspec.pallas.matmul import float8_kernel

    monkeypatch.setattr(float8_kernel, "_MAX_STAGES", 4)
    x, (weight, parts) = rows_with_nan(2, 2048), blocks_of(2048, 128)
    run = float8_kernel.split_matmul_kernel.__wrapped__
    y = run(x, weight, tiling=Float8Tiling(8, 1), interpret=interpreter)
    assert_is_product(y, x, dequantised(parts))
    assert_no_races()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_scale_per_column_is_applied_at_the_end(interpreter, parts):
    from jaxspec.pallas.matmul.float8_kernel import matmul_kernel, split_matmul_kernel

    x, weight = rows_with_nan(5, 384), rows_of(384, 192)
    expected = dequantised_rows(weight)
    tiling = Float8Tiling(8, parts)
    y = split_matmul_kernel(x, weight, tiling=tiling, interpret=interpreter)
    assert_is_product(y, x, expected)
    assert_is_product(matmul_kernel(x, weight, interpret=interpreter), x, expected)
    assert_no_races()


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SQUARED_RELU])
def test_the_activation_is_applied_and_rounded_first(interpreter, activation):
    from jaxspec.pallas.matmul.float8_kernel import activated_matmul_kernel

    x = rows_with_nan(3, 1024 * activation.pieces)
    weight, parts = blocks_of(1024, 64)
    tiling = Float8Tiling(8, 2)
    y = activated_matmul_kernel(x, weight, activation, tiling=tiling, interpret=interpreter)
    wide = jnp.split(x.astype(jnp.float32), activation.pieces, axis=1)
    # As a program: XLA's exponential may differ by a rounding otherwise.
    activated = jax.jit(lambda *x: activation.of_blocks(x).astype(jnp.bfloat16))(*wide)
    y, expected = np.asarray(y, np.float64).sum(axis=0), np.asarray(activated, np.float64)
    expected = expected @ dequantised(parts)
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, jnp.bfloat16)  # a gate may round the other way
    assert_no_races()


def test_heads_are_normed_and_gated_first(interpreter):
    from jaxspec.pallas.matmul.float8_kernel import gated_norm_matmul_kernel

    heads, norm = gated_heads_of(5, 8, 192)
    weight, parts = blocks_of(1024, 128)
    y = gated_norm_matmul_kernel(
        heads, norm, weight, tiling=Float8Tiling(8, 2), interpret=interpreter
    )
    y, expected = np.asarray(y, np.float64).sum(axis=0), gated_norm(heads, norm)
    check(y, expected @ dequantised(parts), jnp.bfloat16)
    assert_no_races()


@pytest.mark.parametrize("bug", SCALE_BUGS)
def test_a_planted_bug_of_scales_is_seen(interpreter, bug):
    from jaxspec.pallas.matmul.float8_kernel import matmul_kernel

    x, (weight, parts) = rows_with_nan(3, 512), blocks_of(512, 192)
    with pytest.raises(AssertionError):
        y = matmul_kernel(x, bug(weight), interpret=interpreter)
        assert_is_product(y, x, dequantised(parts))

"""The kernel of e4m3 rows and published weights in 8 bits, against float64 in the interpreter.

Clusters run on GPUs alone; there, and how the kernel compiles: `test_published_ops`,
`test_float8_compile`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from products import NAN_ROW
from published_8bit import (
    SCALE_BUGS,
    assert_is_product,
    blocks_of,
    dequantised,
    dequantised_rows,
    rows_of,
    rows_with_nan,
    terms_of,
)
from races import assert_no_races

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.float8_gemm import Float8GemmTiling
from jaxspec.pallas.matmul.float8_terms import CHUNK, as_multiplied, of_whole_rows


def run(x, weight, tiling, interpreter, kernel=None):
    from jaxspec.pallas.matmul.float8_gemm_kernel import gemm_kernel

    kernel = kernel or gemm_kernel
    terms = terms_of(x, weight.terms)
    y = kernel(terms, weight, tokens=len(x), dtype=x.dtype, tiling=tiling, interpret=interpreter)
    assert y.shape[-2:] == (len(x), weight.outer)
    assert y.dtype == (jnp.float32 if tiling.parts > 1 else x.dtype)
    assert_no_races()
    return y


@pytest.mark.parametrize(
    ("tokens", "inner", "outers", "tiling"),
    [
        (9, 512, (64,), Float8GemmTiling(16, 1, 1, 1, 1)),
        (20, 1536, (192, 64), Float8GemmTiling(24, 1, 2, 2, 1)),
        (100, 640, (192,), Float8GemmTiling(56, 2, 1, 3, 1)),  # parts of 1 or 2 chunks
        (72, 512, (64, 128), Float8GemmTiling(72, 1, 3, 2, 1)),  # rows in pieces of 64 and 8
        (130, 256, (128,), Float8GemmTiling(128, 2, 2, 2, 1)),
    ],
)
@pytest.mark.parametrize("terms", [2, 1])
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outers, tiling, terms
):
    x, (weight, parts) = rows_with_nan(tokens, inner), blocks_of(inner, *outers)
    weight = dataclasses.replace(weight, terms=terms)
    y = run(x, weight, tiling, interpreter)
    assert_is_product(y, as_multiplied(x, weight), dequantised(parts))


@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("stages", [2, 3])
def test_blocks_compute_several_tiles_through_a_ring_that_is_refilled(
    monkeypatch, interpreter, stages, terms
):
    """Two blocks have 5 and 4 of 9 tiles, with 2 or 3 chunks each."""
    from jaxspec.pallas.matmul import float8_gemm_kernel

    monkeypatch.setattr(float8_gemm_kernel, "_MAX_STAGES", stages)
    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    x, (weight, parts) = rows_with_nan(20, 5 * CHUNK), blocks_of(5 * CHUNK, 64, 128)
    weight = dataclasses.replace(weight, terms=terms)
    kernel = float8_gemm_kernel.gemm_kernel.__wrapped__
    for tiling in (Float8GemmTiling(8, 3, 1, 2, 1), Float8GemmTiling(8, 3, 3, 1, 1)):
        y = run(x, weight, tiling, interpreter, kernel)
        assert_is_product(y, as_multiplied(x, weight), dequantised(parts))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_scale_per_column_is_applied_at_the_end(interpreter, parts):
    x, weight = rows_with_nan(12, 384), rows_of(384, 128)
    y = run(x, weight, Float8GemmTiling(16, 1, 2, parts, 1), interpreter)
    assert_is_product(y, x, dequantised_rows(weight))


def test_a_scale_per_column_and_one_per_row(interpreter):
    from jaxspec.pallas.matmul.float8_gemm_kernel import gemm_kernel

    weight = dataclasses.replace(rows_of(384, 128), terms=1)
    x, tiling = rows_with_nan(5, 384), Float8GemmTiling(8, 1, 1, 2, 1)
    terms = of_whole_rows(x)
    assert terms.factors.shape == (3, 8) and terms.numbers[0].shape == (8, 384)
    y = gemm_kernel(terms, weight, tokens=5, dtype=x.dtype, tiling=tiling, interpret=interpreter)
    assert_no_races()
    assert_is_product(y, as_multiplied(x, weight), dequantised_rows(weight))


def test_a_nan_stays_in_its_row_and_in_its_tile(interpreter):
    x, (weight, _) = rows_with_nan(40, 512), blocks_of(512, 64)
    y = np.asarray(run(x, weight, Float8GemmTiling(16, 3, 1, 1, 1), interpreter), np.float32)
    np.testing.assert_array_equal(np.isnan(y).all(axis=1), np.arange(40) == NAN_ROW)
    assert not np.isnan(np.delete(y, NAN_ROW, axis=0)).any()


@pytest.mark.parametrize("bug", SCALE_BUGS)
def test_a_planted_bug_of_scales_is_seen(interpreter, bug):
    x, (weight, parts) = rows_with_nan(12, 512), blocks_of(512, 192)
    with pytest.raises(AssertionError):
        y = run(x, bug(weight), Float8GemmTiling(16, 1, 3, 1, 1), interpreter)
        assert_is_product(y, x, dequantised(parts))

"""The kernel of many e4m3 rows and published weights in 8 bits, against float64, interpreted.

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
from jaxspec.pallas.matmul.float8_many_rows import Float8ManyRowsTiling
from jaxspec.pallas.matmul.float8_terms import CHUNK, as_multiplied, of_whole_rows


def run(x, weight, tiling, interpreter, kernel=None, terms=None):
    from jaxspec.pallas.matmul.float8_many_rows_kernel import many_rows_kernel

    kernel = kernel or many_rows_kernel
    terms = terms or terms_of(x, weight.terms)
    y = kernel(terms, weight, tokens=len(x), dtype=x.dtype, tiling=tiling, interpret=interpreter)
    assert y.shape[-2:] == (len(x), weight.outer)
    assert y.dtype == (jnp.float32 if tiling.parts > 1 else x.dtype)
    assert_no_races()
    return y


@pytest.mark.parametrize(
    ("tokens", "inner", "outers", "tiling"),
    [
        (128, 256, (128,), Float8ManyRowsTiling(1, 1)),
        (140, 768, (192, 64), Float8ManyRowsTiling(2, 1)),  # a part begins within a block's columns
        (129, 1024, (128,), Float8ManyRowsTiling(2, 2)),  # a block of one row
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


@pytest.mark.parametrize(("stages", "terms"), [(2, 2), (3, 1)])
def test_blocks_compute_several_tiles_through_a_ring_that_is_refilled(
    monkeypatch, interpreter, stages, terms
):
    """Two blocks have 5 and 4 of 9 tiles, in two groups of rows; a tile has one to four units."""
    from jaxspec.pallas.matmul import float8_many_rows_kernel

    monkeypatch.setattr(float8_many_rows_kernel, "_MAX_STAGES", stages)
    monkeypatch.setattr(float8_many_rows_kernel, "_GROUP", 2)
    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    kernel = float8_many_rows_kernel.many_rows_kernel.__wrapped__
    for parts, chunks, columns in ((1, 2, 3), (3, 6, 1)):
        x, (weight, oracle) = (
            rows_with_nan(300, chunks * CHUNK),
            blocks_of(chunks * CHUNK, 128 * columns),
        )
        weight = dataclasses.replace(weight, terms=terms)
        y = run(x, weight, Float8ManyRowsTiling(3, parts), interpreter, kernel)
        assert_is_product(y, as_multiplied(x, weight), dequantised(oracle))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_scale_per_column_is_applied_at_the_end(interpreter, parts):
    x, weight = rows_with_nan(132, 384), rows_of(384, 128)
    y = run(x, weight, Float8ManyRowsTiling(2, parts), interpreter)
    assert_is_product(y, x, dequantised_rows(weight))


def test_a_scale_per_column_and_one_per_row(interpreter):
    weight = dataclasses.replace(rows_of(512, 128), terms=1)
    x = rows_with_nan(128, 512)
    y = run(x, weight, Float8ManyRowsTiling(1, 2), interpreter, terms=of_whole_rows(x))
    assert_is_product(y, as_multiplied(x, weight), dequantised_rows(weight))


def test_a_nan_stays_in_its_row(interpreter):
    x, (weight, _) = rows_with_nan(136, 256), blocks_of(256, 128)
    y = np.asarray(run(x, weight, Float8ManyRowsTiling(2, 1), interpreter), np.float32)
    np.testing.assert_array_equal(np.isnan(y).all(axis=1), np.arange(136) == NAN_ROW)
    assert not np.isnan(np.delete(y, NAN_ROW, axis=0)).any()


@pytest.mark.parametrize("bug", SCALE_BUGS)
def test_a_planted_bug_of_scales_is_seen(interpreter, bug):
    x, (weight, parts) = rows_with_nan(128, 256), blocks_of(256, 64, 192)
    with pytest.raises(AssertionError):
        y = run(x, bug(weight), Float8ManyRowsTiling(1, 1), interpreter)
        assert_is_product(y, x, dequantised(parts))

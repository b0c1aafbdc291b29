"""Inputs of both recurrences: ops and kernels against their references, with padding and NaN."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import REAL, ROWS
from recurrences import GDN, MAMBA2

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas import dispatch

SMALL_GDN, SMALL_MAMBA2 = GdnShape(2, 4, 8, 8), Mamba2Shape(4, 2, head_dim=5, state_dim=8)


def check(family, run, shape, dtype, width, **options):
    """`run` is the reference: in real tokens, and bit for bit in the pool."""
    projected, params, conv = family.project(shape, dtype, width, **options)
    ours, after = run(projected, params, conv, 1, ROWS)
    reference = jax.jit(lambda x, conv: family.inputs.reference(x, params, conv, 1, ROWS))
    expected, expected_after = reference(projected, conv)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (after, expected_after)))
    eps = float(jnp.finfo(dtype).eps)
    # In 16 bits the convolution may round to a neighbour, and the length of GDN's heads with it.
    loose = {"gdn": max(4 * eps, 2e-5), "mamba2": max(2 * eps, 5e-6)}[family.name]
    near_zero = {"gdn": (loose / 10, 0.0), "mamba2": (loose / 2, 1e-6)}[family.name]  # absolute
    for name, mine, theirs in zip(ours._fields, ours, expected, strict=True):
        convolved = name in family.convolved
        assert mine.dtype == (dtype if convolved and family is MAMBA2 else jnp.float32)
        assert mine.shape == theirs.shape
        rtol, atol = (loose, near_zero[0]) if convolved else (2e-6, near_zero[1])
        mine, theirs = (np.asarray(x, np.float32) for x in (mine, theirs))
        if mine.ndim == 1:
            np.testing.assert_allclose(mine, theirs, rtol=rtol)
            continue
        for row, count in REAL.items():
            got, wanted = mine[row, :count], theirs[row, :count]
            assert np.isnan(wanted).all() == (row == 1)
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "shape", "dtype", "width", "options"),
    [
        (GDN, SMALL_GDN, jnp.float32, 3, {}),
        (MAMBA2, SMALL_MAMBA2, jnp.float32, 3, {}),
        (MAMBA2, SMALL_MAMBA2, jnp.float32, 3, {"bias": False}),
        (MAMBA2, SMALL_MAMBA2, jnp.bfloat16, 2, {}),
    ],
    ids=str,
)
def test_the_op_is_the_convolution_its_heads_and_the_gates(family, shape, dtype, width, options):
    check(family, family.inputs.run, shape, dtype, width, **options)


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        (GDN, SMALL_GDN, "104 in all, but this one has 64"),
        (MAMBA2, SMALL_MAMBA2, "76 in all, but this one has 52"),
    ],
    ids=str,
)
def test_a_part_of_a_projection_is_refused(family, shape, message):
    projected, params, conv = family.project(shape, jnp.float32, 3)
    with pytest.raises(ValueError, match=message):
        family.inputs.run(projected[..., : shape.conv_dim], params, conv, 1, ROWS)


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "width", "options"),
    [
        (GDN, GdnShape(4, 8), jnp.bfloat16, 4, {}),
        (GDN, GdnShape(4, 4), jnp.float32, 1, {"spare": 3}),
        (GDN, GdnShape(8, 8, 64, 64), jnp.float16, 2, {"spare": 1}),
        (GDN, GdnShape(8, 16, 64, 64), jnp.float32, 9, {}),
        (MAMBA2, Mamba2Shape(8, 2), jnp.bfloat16, 4, {}),
        # B and C in blocks of 128.
        (MAMBA2, Mamba2Shape(16, 1, head_dim=80), jnp.bfloat16, 1, {"spare": 3}),
        (MAMBA2, Mamba2Shape(8, 1, state_dim=256), jnp.float16, 2, {"spare": 1, "bias": False}),
        (MAMBA2, Mamba2Shape(48, 1), jnp.float32, 9, {}),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, family, shape, dtype, width, options
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(projected, params, conv, layer, rows):
        operands = projected, params, conv, jnp.int32(layer), rows
        return family.inputs.kernel(*operands, interpret=interpreter)

    check(family, run, shape, dtype, width, **options)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("family", "shape", "width"),
    [
        *itertools.product([GDN], GDN.published.values(), range(1, 10)),
        *itertools.product(
            [MAMBA2], [*MAMBA2.published.values(), Mamba2Shape(128, 8, head_dim=80)], [1, 2, 4, 9]
        ),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(family, shape, dtype, width):
    inputs = family.inputs
    dispatch._chosen.pop(inputs.name, None)
    check(family, inputs.run, shape, dtype, width)
    assert dispatch.implementations()[inputs.name] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        (GDN, GdnShape(1, 2, 128, 64), "heads of 128 and 64, not all 64 or 128"),
        (
            MAMBA2,
            SMALL_MAMBA2,
            "20 channels of x and 16 of B, not multiples of 256 and 128",
        ),
    ],
    ids=str,
)
def test_on_a_gpu_heads_no_kernel_takes_are_seen_to_run_the_reference(family, shape, reason):
    inputs = family.inputs
    dispatch._chosen.pop(inputs.name, None)
    check(family, inputs.run, shape, jnp.float32, 2)
    assert dispatch.implementations()[inputs.name] == (f"XLA: {reason}",)

"""gdn_inputs against NumPy, and its kernel against its reference, with padding and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import REAL, ROWS, operands

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, gdn_inputs_reference, split_qkv
from jaxspec.pallas.gated_delta.inputs_kernel import gdn_inputs_kernel


def heads_of(shape: GdnShape):
    return GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)


def projection(shape: GdnShape, dtype, width, spare=0):
    """Projection, parameters and pool; columns that no op reads are NaN, and so is padding."""
    rng = np.random.default_rng(width)
    x, weight, conv = operands(shape.conv_dim, dtype, width, spare=spare)
    values = shape.value_heads * shape.value_dim
    unread = jnp.full((*x.shape[:2], values), jnp.nan, dtype)
    b_and_a = jnp.asarray(6 * rng.normal(size=(*x.shape[:2], 2 * shape.value_heads)), dtype)
    # NaN where the channels are: in padding and in row 1.
    columns = x, unread, jnp.where(jnp.isnan(x[..., :1]), jnp.nan, b_and_a), unread[..., :8]
    decay = jnp.asarray(rng.normal(size=(shape.value_heads, 2)), jnp.float32)
    params = GdnParams(weight, decay, heads_of(shape))
    return jnp.concatenate(columns, axis=2), params, conv


def check(projected, params, conv, run):
    """`run` is the reference: in real tokens, and bit for bit in the pool."""
    ours, after = run(projected, params, conv, 1, ROWS)
    reference = jax.jit(lambda x, conv: gdn_inputs_reference(x, params, conv, 1, ROWS))
    expected, expected_after = reference(projected, conv)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (after, expected_after)))
    # In 16 bits the convolution may round to a neighbour, and a head's length with it.
    tolerance = max(4 * float(jnp.finfo(projected.dtype).eps), 2e-5)
    tolerances = [(tolerance, tolerance / 10)] * 3 + [(2e-6, 0)] * 2
    for mine, theirs, (rtol, atol) in zip(ours, expected, tolerances, strict=True):
        assert mine.dtype == jnp.float32 and mine.shape == theirs.shape
        for row, count in REAL.items():
            got, wanted = np.asarray(mine)[row, :count], np.asarray(theirs)[row, :count]
            assert np.isnan(wanted).all() == (row == 1)
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


def test_queries_and_keys_have_length_one_and_values_pass():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(5, 2 * 2 * 8 + 4 * 6)).astype(np.float32)
    q, k, v = split_qkv(jnp.asarray(y), GdnHeads(2, 8, 4))
    queries, keys, values = np.split(y.astype(np.float64), [16, 32], axis=1)
    for got, raw, length in ((q, queries, 8**-0.5), (k, keys, 1.0)):
        raw = raw.reshape(5, 2, 8)
        wanted = raw / np.sqrt((raw**2).sum(axis=2, keepdims=True) + 1e-6) * length
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_array_equal(v, values.reshape(5, 4, 6).astype(np.float32))


def test_a_head_of_zeros_stays_zero():
    q, k, _ = split_qkv(jnp.zeros((1, 24)), GdnHeads(1, 8, 1))
    assert not q.any() and not k.any()


def test_the_op_is_the_convolution_its_heads_and_the_gates():
    shape = GdnShape(2, 4, 8, 8)
    check(*projection(shape, jnp.float32, 3), gdn_inputs)


def test_a_part_of_a_projection_is_refused():
    shape = GdnShape(2, 4, 8, 8)
    projected, params, conv = projection(shape, jnp.float32, 3)
    with pytest.raises(ValueError, match="104 in all, but this one has 64"):
        gdn_inputs(projected[..., : shape.conv_dim], params, conv, 1, ROWS)


@pytest.mark.parametrize(
    ("shape", "dtype", "width", "spare"),
    [
        (GdnShape(4, 8, 128, 128), jnp.bfloat16, 4, 0),
        (GdnShape(4, 4, 128, 128), jnp.float32, 1, 3),
        (GdnShape(8, 8, 64, 64), jnp.float16, 2, 1),
        (GdnShape(8, 16, 64, 64), jnp.float32, 9, 0),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(interpreter, shape, dtype, width, spare):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(projected, params, conv, layer, rows):
        taps, decay, heads = params
        operands = projected, taps, decay, conv, jnp.int32(layer), rows, heads
        return gdn_inputs_kernel(*operands, interpret=interpreter)

    check(*projection(shape, dtype, width, spare=spare), run)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    dispatch._chosen.pop("gdn_inputs", None)
    check(*projection(shape, dtype, width), gdn_inputs)
    assert dispatch.implementations()["gdn_inputs"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_heads_no_kernel_takes_are_seen_to_run_the_reference():
    dispatch._chosen.pop("gdn_inputs", None)
    shape = GdnShape(1, 2, 128, 64)
    check(*projection(shape, jnp.float32, 2), gdn_inputs)
    (implementation,) = dispatch.implementations()["gdn_inputs"]
    assert implementation == "XLA: heads of 128 and 64, not all 64 or 128"

"""Products of more than 64 rows of wide models: how they are cut, and the kernel against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import LOST, check, operands, product

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access, device
from jaxspec.pallas.matmul.gemm import Wave, choose, rows_of
from jaxspec.pallas.matmul.norm_matmul import norm_matmul


def as_they_are(pieces, dtype):
    return [piece.astype(dtype) for piece in pieces]


def products_of_pairs(pieces, dtype):
    one, other = pieces
    return [(one * other).astype(dtype)]


PROJECTED = GDN["qwen3.5-9b"].projected  # 4B's, too
CASES = [  # tokens, inner, outer, warpgroups, pieces, parts, dtype
    (72, 128, 64, 1, 1, 1, jnp.bfloat16),
    (128, 192, 320, 3, 1, 1, jnp.float16),  # the last block's columns are not all there
    (136, 256, 256, 2, 2, 2, jnp.bfloat16),  # blocks of 72 rows, the last not full
    (256, 128, 192, 1, 1, 2, jnp.bfloat16),
    (200, 64, 192, 2, 2, 1, jnp.bfloat16),  # put out by way of the ring
]


@pytest.mark.parametrize(("tokens", "inner", "outer", "groups", "pieces", "parts", "dtype"), CASES)
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outer, groups, pieces, parts, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.gemm_wave_kernel import wave_kernel

    x, weight = operands(tokens, inner, outer, dtype)
    cut, alone = Wave(*rows_of(tokens), groups, pieces, parts), {"interpret": interpreter}
    y = wave_kernel("product", x, weight, cut, as_they_are, cluster=1, **alone)
    assert y.dtype == (dtype if parts == 1 else jnp.float32)
    y = y if parts == 1 else y.sum(axis=0).astype(dtype)
    check(y, product(x, weight), dtype)
    assert not get_races().races_found


@pytest.mark.parametrize(("tokens", "kib"), [(72, 100), (72, 226), (136, 100), (136, 226)])
def test_pairs_of_columns_meet_and_rings_are_refilled(monkeypatch, interpreter, tokens, kib):
    """Also in the largest blocks, whose pieces come one by one."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.gemm_wave_kernel import wave_kernel

    monkeypatch.setattr(access, "room", lambda blocks: 1024 * kib)
    x, weight = operands(tokens, 448, 384, jnp.bfloat16)
    cut, options = Wave(*rows_of(tokens), 2, 2, 1), {"gates": True, "interpret": interpreter}
    y = wave_kernel("pairs", x, weight, cut, products_of_pairs, cluster=1, **options)
    one, other = np.split(product(x, weight), 2, axis=1)
    check(y, one * other, jnp.bfloat16)
    assert not get_races().races_found


PRODUCTS = [  # tokens, inner, outer, gates, most parts -> warpgroups, pieces, parts
    (256, 4096, 12288, True, 1, (3, 2, 1)),
    (128, 4096, 12288, True, 1, (2, 2, 1)),
    (256, 4096, PROJECTED, False, 1, (3, 1, 1)),
    (128, 4096, PROJECTED, False, 1, (2, 1, 1)),
    (256, 12288, 4096, False, 2, (2, 1, 2)),
    (128, 12288, 4096, False, 2, (1, 1, 2)),
    (256, 5120, 17408, True, 1, None),  # a wave and a third
    (128, 4096, 10240, False, 1, None),  # of 80 blocks of 128 columns, or 160 of 64
]


@pytest.mark.parametrize(("tokens", "inner", "outer", "gates", "most", "expected"), PRODUCTS)
def test_a_block_copies_as_little_as_a_wave_allows(tokens, inner, outer, gates, most, expected):
    cut = Wave.of(tokens, inner, outer, gates=gates, most_parts=most)
    assert (cut and cut[2:]) == expected


@pytest.mark.parametrize("tokens", [72, 96, 136, 192, 256])
@pytest.mark.parametrize("model", ["qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"])
def test_all_blocks_run_at_once_and_cover_the_product(model, tokens):
    hidden, inner = HIDDEN[model], INTERMEDIATE[model]
    products = (True, hidden, inner, 1), (False, inner, hidden, 2), (False, hidden, PROJECTED, 1)
    cuts = 0
    for gates, *dims, most in products:
        cut = Wave.of(tokens, *dims, gates=gates, most_parts=most)
        if cut is None:
            continue
        columns = 64 * cut.warpgroups * (1 if gates else cut.pieces)
        blocks = cut.row_blocks * math.ceil(dims[1] / columns) * cut.parts
        least = 0.7 if tokens <= 128 else 0.8
        assert least * device.MULTIPROCESSORS <= blocks <= device.MULTIPROCESSORS
        assert cut.rows * cut.row_blocks >= tokens and dims[0] % (64 * cut.parts) == 0
        cuts += 1
    assert cuts == 3 if model == "qwen3.5-9b" else cuts >= 1


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "options", "expected"),
    [
        (256, 4096, PROJECTED, {}, (128, 2, 3, 1, 1)),
        (256, 4096, 24576, {"gates": True}, (128, 2, 3, 2, 1)),
        (256, 12288, 4096, {"most_parts": 2}, (128, 2, 2, 1, 2)),
        (256, 12288, 4096, {}, (128, 2, 1, 1, 1)),
        (64, 4096, PROJECTED, {}, None),
    ],
)
def test_more_than_64_rows_of_a_wide_model_are_a_wave(rows, inner, columns, options, expected):
    x, weight = (
        jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((rows, inner), (inner, columns))
    )
    assert choose(x, weight, 4096, **options) == (None, expected)


def test_other_products_are_none():
    x, weight = (jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((128, 4096), (4096, 10240)))
    assert choose(x, weight, 4096) == ("128 rows, which make no wave of blocks", None)
    assert choose(x, weight, 2048) == (None, None)
    x = jax.ShapeDtypeStruct((264, 4096), jnp.bfloat16)
    assert choose(x, weight, 4096) == ("not 16 to 256 rows, in steps of 8", None)


@pytest.mark.parametrize("tokens", [128, 256])
def test_rings_without_room_are_refused(monkeypatch, tokens):
    """Where a chunk could not arrive while another is multiplied, its copies would never start."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("the kernels need jax 0.11")
    from jaxspec.pallas.matmul.gemm_wave_kernel import _Rings

    cut, dtype, chunk = Wave(*rows_of(tokens), 3, 2, 1), jnp.dtype(jnp.bfloat16), 64 * 1024
    beside = 0 if tokens > 128 else 24 * 1024
    monkeypatch.setattr(access, "room", lambda blocks: 2 * chunk + beside)
    rings = _Rings.of(cut, 64, dtype, dtype)
    assert min(rings.stages, rings.slots // len(rings.groups)) >= 1 and rings.slots > 1
    monkeypatch.setattr(access, "room", lambda blocks: chunk + beside)
    assert _Rings.of(cut, 1, dtype, dtype).stages == 1
    with pytest.raises(ValueError, match="room for 2 chunks of 65536 bytes, but there are 65536"):
        _Rings.of(cut, 64, dtype, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [72, 128, 200, 256])
def test_on_a_gpu_a_norm_and_a_wave_equal_the_oracle(tokens):
    """Behind two partial sums; the last block's columns are not all there."""
    dispatch._chosen.pop("norm_matmul", None)
    x, weight = operands(tokens, 4096, PROJECTED, jnp.bfloat16)
    delta = jnp.stack([x, -x]).astype(jnp.float32).at[:, LOST].set(0.0)
    ones = jnp.ones(4096, jnp.bfloat16)
    total, y = jax.jit(norm_matmul, static_argnums=3)(x, delta, ones, 1e-6, weight)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (total, x)))
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    check(y, product(normed.astype(x.dtype), weight), y.dtype)
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)

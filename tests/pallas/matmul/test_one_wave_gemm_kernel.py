"""Products of more than 64 rows of wide models: their tiling, and the kernel against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import NAN_ROW, check, operands, product

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.gemm import OneWave, choose, split_rows
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense


def cast(pieces, dtype):
    return [piece.astype(dtype) for piece in pieces]


def multiply_pairs(pieces, dtype):
    gate, up = pieces
    return [(gate * up).astype(dtype)]


def shapes(rows, inner, columns):
    x, weight = (
        jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((rows, inner), (inner, columns))
    )
    return x, Dense(weight)


PROJECTED = GDN["qwen3.5-9b"].projected  # the 4B has as many columns
CASES = [  # tokens, inner, outer, warpgroups, pieces, parts, dtype
    (72, 128, 64, 1, 1, 1, jnp.bfloat16),
    (128, 192, 320, 3, 1, 1, jnp.float16),  # the last block's columns are not all real
    (136, 256, 256, 2, 2, 2, jnp.bfloat16),  # blocks of 72 rows; the second is not full
    (256, 128, 192, 1, 1, 2, jnp.bfloat16),
    (200, 64, 192, 2, 2, 1, jnp.bfloat16),  # the output goes through the ring
]


@pytest.mark.parametrize(("tokens", "inner", "outer", "groups", "pieces", "parts", "dtype"), CASES)
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outer, groups, pieces, parts, dtype
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.one_wave_gemm_kernel import one_wave_kernel

    x, weight = operands(tokens, inner, outer, dtype)
    wave = OneWave(*split_rows(tokens), groups, pieces, parts)
    y = one_wave_kernel("product", x, weight, wave, cast, cluster=1, interpret=interpreter)
    assert y.dtype == (dtype if parts == 1 else jnp.float32)
    y = y if parts == 1 else y.sum(axis=0).astype(dtype)
    check(y, product(x, weight), dtype)
    assert not get_races().races_found


@pytest.mark.parametrize(("tokens", "kib"), [(72, 100), (72, 226), (136, 100), (136, 226)])
def test_pairs_of_columns_are_finished_together_and_rings_refilled(
    monkeypatch, interpreter, tokens, kib
):
    """The largest blocks, with 136 tokens, have a slot in the ring for each piece."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.one_wave_gemm_kernel import one_wave_kernel

    monkeypatch.setattr(device, "room", lambda blocks: 1024 * kib)
    x, weight = operands(tokens, 448, 384, jnp.bfloat16)
    wave, options = OneWave(*split_rows(tokens), 2, 2, 1), {"cluster": 1, "interpret": interpreter}
    y = one_wave_kernel("pairs", x, weight, wave, multiply_pairs, gate_up=True, **options)
    gate, up = np.split(product(x, weight), 2, axis=1)
    check(y, gate * up, jnp.bfloat16)
    assert not get_races().races_found


PRODUCTS = [  # tokens, inner, outer, gate_up, max_parts -> warpgroups, pieces, parts
    (256, 4096, 12288, True, 1, (3, 2, 1)),
    (128, 4096, 12288, True, 1, (2, 2, 1)),
    (256, 4096, PROJECTED, False, 1, (3, 1, 1)),
    (128, 4096, PROJECTED, False, 1, (2, 1, 1)),
    (256, 12288, 4096, False, 2, (2, 1, 2)),
    (128, 12288, 4096, False, 2, (1, 1, 2)),
    (256, 5120, 17408, True, 1, None),  # would be a wave and a third
    (128, 4096, 10240, False, 1, None),  # 80 blocks of 128 columns, or 160 of 64
]


@pytest.mark.parametrize(("tokens", "inner", "outer", "gate_up", "max_parts", "expected"), PRODUCTS)
def test_a_block_copies_as_little_as_a_wave_allows(
    tokens, inner, outer, gate_up, max_parts, expected
):
    wave = OneWave.of(tokens, inner, outer, gate_up=gate_up, max_parts=max_parts)
    assert (wave and wave[2:]) == expected


@pytest.mark.parametrize("tokens", [72, 96, 136, 192, 256])
@pytest.mark.parametrize("model", ["qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b"])
def test_all_blocks_run_at_once_and_cover_the_product(model, tokens):
    hidden, inner = HIDDEN[model], INTERMEDIATE[model]
    products = (True, hidden, inner, 1), (False, inner, hidden, 2), (False, hidden, PROJECTED, 1)
    waves = 0
    for gate_up, *dims, max_parts in products:
        wave = OneWave.of(tokens, *dims, gate_up=gate_up, max_parts=max_parts)
        if wave is None:
            continue
        columns = 64 * wave.warpgroups * (1 if gate_up else wave.pieces)
        blocks = wave.row_blocks * math.ceil(dims[1] / columns) * wave.parts
        min_busy = 0.7 if tokens <= 128 else 0.8
        assert min_busy * device.MULTIPROCESSORS <= blocks <= device.MULTIPROCESSORS
        assert wave.rows * wave.row_blocks >= tokens and dims[0] % (64 * wave.parts) == 0
        waves += 1
    assert waves == 3 if model == "qwen3.5-9b" else waves >= 1


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "options", "expected"),
    [
        (256, 4096, PROJECTED, {}, (128, 2, 3, 1, 1)),
        (256, 4096, 24576, {"gate_up": True}, (128, 2, 3, 2, 1)),
        (256, 12288, 4096, {"max_parts": 2}, (128, 2, 2, 1, 2)),
        (256, 12288, 4096, {}, (128, 2, 1, 1, 1)),
        (64, 4096, PROJECTED, {}, None),
    ],
)
def test_more_than_64_rows_of_a_wide_model_are_a_wave(rows, inner, columns, options, expected):
    assert choose(*shapes(rows, inner, columns), 4096, **options) == (None, expected)


@pytest.mark.parametrize(
    ("rows", "hidden", "why"),
    [
        (128, 4096, "128 rows, which make no wave of blocks"),
        (128, 2048, None),
        (264, 4096, "not 16 to 256 rows, in steps of 8"),
    ],
)
def test_products_that_fill_no_wave_have_no_tiling(rows, hidden, why):
    assert choose(*shapes(rows, 4096, 10240), hidden) == (why, None)


@pytest.mark.mosaic
@pytest.mark.parametrize("tokens", [128, 256])
def test_rings_without_room_are_refused(monkeypatch, tokens):
    """A chunk could not arrive while another is multiplied, and its copies would never start."""
    from jaxspec.pallas.matmul.one_wave_gemm_kernel import _Rings

    wave, dtype, chunk = OneWave(*split_rows(tokens), 3, 2, 1), jnp.dtype(jnp.bfloat16), 64 * 1024
    out = 0 if tokens > 128 else 24 * 1024  # bytes of the output's own buffer
    monkeypatch.setattr(device, "room", lambda blocks: 2 * chunk + out)
    rings = _Rings.of(wave, 64, dtype, dtype)
    assert min(rings.stages, rings.slots // len(rings.groups)) >= 1 and rings.slots > 1
    monkeypatch.setattr(device, "room", lambda blocks: chunk + out)
    assert _Rings.of(wave, 1, dtype, dtype).stages == 1
    with pytest.raises(ValueError, match="room for 2 chunks of 65536 bytes, but there are 65536"):
        _Rings.of(wave, 64, dtype, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [72, 128, 200, 256])
def test_on_a_gpu_a_norm_and_a_wave_equal_the_oracle(tokens):
    """Two partial sums are pending, and the last block's columns are not all real."""
    dispatch._chosen.pop("norm_matmul", None)
    x, weight = operands(tokens, 4096, PROJECTED, jnp.bfloat16)
    pending = jnp.stack([x, -x]).astype(jnp.float32).at[:, NAN_ROW].set(0.0)
    norm = Norm(jnp.ones(4096, jnp.bfloat16), 1e-6)
    total, y = jax.jit(norm_matmul)(x, pending, norm, Dense(weight))
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (total, x)))
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    check(y, product(normed.astype(x.dtype), weight), y.dtype)
    assert dispatch.implementations()["norm_matmul"] == ("kernel",)

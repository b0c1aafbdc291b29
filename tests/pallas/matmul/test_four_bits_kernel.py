"""The kernel for published weights in 4 bits, against float64 in the interpreter."""

import dataclasses

import jax.numpy as jnp
import pytest
from published_4bit import abstract_4_bits, float4_of, int4_of
from published_8bit import assert_is_product, rows_with_nan
from races import assert_no_races

from jaxspec.pallas.matmul.four_bits import FourBitsTiling

SIZES = [
    (1, 256, 64, FourBitsTiling(8, 1, 1, 1)),
    (3, 1408, 192, FourBitsTiling(8, 1, 1, 3)),  # parts of two stages; the last has one half
    (13, 512, 128, FourBitsTiling(8, 2, 1, 2)),
    (20, 640, 256, FourBitsTiling(16, 2, 2, 1)),
]


def weight_of(kind, inner, outer):
    if kind == "nvfp4":
        return float4_of(inner, outer)
    group, has_zeros = kind
    return int4_of(inner, outer, group, has_zeros=has_zeros)


@pytest.mark.few(12)
@pytest.mark.parametrize(("tokens", "inner", "outer", "tiling"), SIZES)
@pytest.mark.parametrize("kind", ["nvfp4", (128, False), (128, True), (64, False), (32, True)])
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, tokens, inner, outer, tiling, kind
):
    from jaxspec.pallas.matmul.four_bits_kernel import four_bits_kernel

    x, (weight, expected) = rows_with_nan(tokens, inner), weight_of(kind, inner, outer)
    y = four_bits_kernel(x, weight, tiling=tiling, interpret=interpreter)
    assert y.dtype == (jnp.float32 if tiling.parts > 1 else jnp.bfloat16)
    assert_is_product(y, x, expected)
    assert_no_races()


@pytest.mark.parametrize(("warpgroups", "turns"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["nvfp4", (128, True)])
def test_the_ring_is_refilled(monkeypatch, interpreter, kind, warpgroups, turns):
    """By ten and a half stages of features, as many as Nemotron-3-Nano has."""
    from jaxspec.pallas.matmul import four_bits_kernel

    monkeypatch.setattr(four_bits_kernel, "_MAX_STAGES", 2)
    outer, tiling = 64 * warpgroups, FourBitsTiling(8, 1, warpgroups, 1, turns)
    x, (weight, expected) = rows_with_nan(2, 2688), weight_of(kind, 2688, outer)
    run = four_bits_kernel.four_bits_kernel.__wrapped__
    y = run(x, weight, tiling=tiling, interpret=interpreter)
    assert_is_product(y, x, expected)
    assert_no_races()


@pytest.mark.parametrize(("inner", "parts"), [(256, 1), (1408, 4)])
def test_a_turn_may_have_no_stage(interpreter, inner, parts):
    """Of a single one, and of parts of one or two stages whose last has a half."""
    from jaxspec.pallas.matmul.four_bits_kernel import four_bits_kernel

    x, (weight, expected) = rows_with_nan(3, inner), weight_of((32, True), inner, 64)
    tiling = FourBitsTiling(8, 1, 1, parts, 2)
    y = four_bits_kernel(x, weight, tiling=tiling, interpret=interpreter)
    assert_is_product(y, x, expected)
    assert_no_races()


@pytest.mark.mosaic
@pytest.mark.parametrize("kind", ["nvfp4", (64, True)])
def test_more_rows_have_all_shared_memory_however_many_blocks(kind):
    """Their registers allow one block on a multiprocessor."""
    from jaxspec.pallas.matmul.four_bits_kernel import _Block

    def stages(tokens, outer):
        weight = abstract_4_bits(kind, 4096, outer)
        tiling = FourBitsTiling.of(tokens, weight)
        return _Block.of(weight, tiling, jnp.dtype(jnp.bfloat16), is_interpreted=False).stages

    assert stages(24, 24576) == stages(24, 2048)
    assert 2 <= stages(16, 24576) < stages(16, 2048)


def rotated_words(weight):
    return dataclasses.replace(weight, array=weight.array >> 4 | weight.array << 12)


def scales_of_the_next_columns(weight):
    return dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=1))


def scales_of_the_next_features(weight):
    return dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=0))


@pytest.mark.parametrize(
    "bug", [rotated_words, scales_of_the_next_columns, scales_of_the_next_features]
)
@pytest.mark.parametrize("kind", ["nvfp4", (128, False)])
def test_a_planted_bug_is_seen(interpreter, kind, bug):
    from jaxspec.pallas.matmul.four_bits_kernel import four_bits_kernel

    x, (weight, expected) = rows_with_nan(3, 512), weight_of(kind, 512, 64)
    y = four_bits_kernel(x, bug(weight), interpret=interpreter)
    with pytest.raises(AssertionError):
        assert_is_product(y, x, expected)

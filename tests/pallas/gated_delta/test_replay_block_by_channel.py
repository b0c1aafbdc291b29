"""The kernel of gdn_replay for a decay by channel, against its reference."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gdn_replays import abstract_pools, abstract_region, check, interpreted
from pairwise import soak
from recurrences import KDA
from replays import nan, pools, walk
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.replay import why_not_kernel
from jaxspec.pallas.norm.gated_norm import GatedNorm

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("shape", "dtype", "width", "window", "splits", "normed"),
    [
        (GdnShape(1, 1), jnp.float32, 1, None, 1, None),
        (GdnShape(1, 1), jnp.float32, 3, 9, 4, None),
        (GdnShape(2, 2), jnp.float32, 4, 8, 1, jnp.bfloat16),
        (GdnShape(2, 2), jnp.float16, 4, None, 1, None),
        (GdnShape(1, 1), jnp.float16, 1, None, 1, jnp.float32),
        (GdnShape(1, 1), jnp.bfloat16, 1, 8, 2, None),
        (GdnShape(1, 1), jnp.bfloat16, 8, 20, 1, jnp.bfloat16),  # a fold of two chunks
        (GdnShape(1, 1, 128, 64), jnp.float32, 2, 10, 1, jnp.float16),
        (GdnShape(1, 1, 128, 64), jnp.float16, 5, None, 1, None),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(shape, dtype, width, window, splits, normed):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = interpreted(plgpu.InterpretGPUParams(detect_races=True), splits)
    check(run, shape, dtype, width, window, normed=normed, family=KDA)
    assert not get_races().races_found


def test_decays_of_another_number_of_channels_have_no_kernel():
    for key_dim, has_kernel in ((64, False), (128, True)):
        states, ring = pools(KDA, np.zeros, GdnShape(1, 1, key_dim, 64), width=2)
        why = why_not_kernel(2, states, ring)
        assert why is None if has_kernel else "64 channels" in why


@pytest.mark.mosaic
def test_steps_of_several_widths_share_a_ring():
    """A ring that narrow steps have filled is read by a wide one as far as its window goes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = GdnShape(1, 1, 128, 64)
    empty = pools(KDA, nan, shape, width=4, window=8)
    widths = [1] * 8 + [4] + [1] * 5 + [4]
    run, rng = interpreted(plgpu.InterpretGPUParams()), np.random.default_rng(0)
    _, _, folds = walk(KDA, run, rng, empty, widths, lambda real: real, shape=shape, slowed=0.05)
    assert folds >= 3


@pytest.mark.mosaic
@pytest.mark.parametrize("width", [1, 4])
def test_two_blocks_share_a_multiprocessor(monkeypatch, width):
    """As with a decay per head: a step of 64 rows takes 1.5 times as long with one (H200)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.gated_delta import replay_kernel

    def num_bytes(memory):
        if isinstance(memory, plgpu.Barrier):
            return 0
        if isinstance(memory, plgpu.RefUnion):
            return max(map(num_bytes, memory.refs))
        whole = math.prod(memory.shape) * memory.dtype.itemsize
        return -(-whole // 1024) * 1024  # Mosaic rounds up each allocation

    made, scratch = [], replay_kernel._scratch

    def kept(*args):
        made.append(scratch(*args))
        return made[-1]

    monkeypatch.setattr(replay_kernel, "_scratch", kept)
    head = array(64, width, 32, 128)
    tokens = GdnTokens(head, head, head, head, array(64, width, 32))
    held = abstract_pools(KDA.typical, jnp.float32, width, KDA)
    jax.eval_shape(KDA.replay.kernel, tokens, *held, jnp.int32(0), abstract_region(64))
    barriers, reserved = 1024, 1024
    assert sum(map(num_bytes, made[-1].values())) + barriers + reserved <= 228 * 1024 // 2


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("width", "window"), [(1, None), (3, None), (4, None), (8, None), soak(4, 64)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_it_compiles_for_an_h200(h200, monkeypatch, capfd, dtype, width, window, rows):
    """In one layer with its output norm, where a head is one block's."""
    shape = KDA.typical

    def step(tokens, states, ring, gates, weight, region):
        norm = GatedNorm(gates, weight, first=0, eps=1e-6, gate="sigmoid")
        for layer, norm_of_layer in enumerate((None, norm)):
            on_device = jnp.int32(layer)
            out, states, ring = KDA.replay.kernel(
                tokens, states, ring, on_device, region, norm_of_layer
            )
            tokens = tokens._replace(v=out)
        return out, states, ring

    head = array(rows, width, shape.key_heads, shape.key_dim)
    tokens = GdnTokens(head, head, head, head, array(rows, width, shape.value_heads))
    held = abstract_pools(shape, dtype, width, KDA, window)
    gates = array(rows * width, shape.value_heads * shape.value_dim, dtype=jnp.bfloat16)
    operands = (tokens, *held, gates, array(shape.value_dim), abstract_region(rows))
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(1, 2))
    assert_lean(compiled, capfd.readouterr().out, held)

"""Loads and stores in pieces of any width, shares of shared memory, and the stages of a ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.gpu import access, device, layouts


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("dtype", "shape", "layout"),
    [
        (jnp.bfloat16, (256,), lambda: layouts.vectors(2)),
        (jnp.float32, (512,), lambda: layouts.vectors(4)),
        (jnp.bfloat16, (48,), lambda: layouts.lane_layout(48)),
        (jnp.float32, (64,), lambda: layouts.lane_layout(64)),
        (jnp.float32, (9,), lambda: layouts.lane_layout(9)),
        (jnp.float32, (88,), lambda: layouts.lane_layout(88)),
        (jnp.float32, (2,), lambda: layouts.lane_layout(2)),
        (jnp.bfloat16, (16, 32), lambda: layouts.piece_layout(16, 32, 2)),
        (jnp.bfloat16, (2, 32), lambda: layouts.piece_layout(2, 32, 2)),
        (jnp.float32, (1, 8), lambda: layouts.piece_layout(1, 8, 4)),
        (jnp.float32, (4, 8), lambda: layouts.piece_layout(4, 8, 4)),
    ],
)
def test_a_load_and_a_store_copy(dtype, shape, layout):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x, out):
        piece = jax.lax.axis_index("piece")
        values = access.load(x.at[piece], layout())
        access.store(out.at[piece], values)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, *shape)), dtype)
    copy = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, dtype),
        grid=(3,),
        grid_names=("piece",),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    np.testing.assert_array_equal(jax.jit(copy)(x), x)


@pytest.mark.mosaic
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("is_shared", [True, False])
def test_vectors_wider_than_a_swizzle_are_refused_in_shared_memory(dtype, itemsize, is_shared):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = layouts.piece_layout(8, 128, itemsize)

    def body(x, out, copied, barrier):
        plgpu.copy_gmem_to_smem(x, copied.at[1], barrier)
        plgpu.barrier_wait(barrier)
        out[...] = access.load(copied.at[1] if is_shared else x, layout)

    x = jax.ShapeDtypeStruct((8, 128), dtype)
    scratch = plgpu.SMEM((2, 8, 128), dtype), plgpu.Barrier()
    copy = plgpu.kernel(body, out_type=x, scratch_types=scratch)
    if is_shared and itemsize < x.dtype.itemsize:
        with pytest.raises(ValueError, match="32"):
            jax.eval_shape(copy, x)
    else:
        assert jax.eval_shape(copy, x).shape == x.shape


def test_two_blocks_fit_where_there_are_more_than_multiprocessors():
    assert device.room(132) > 2 * device.room(133) and device.room(133) > 108 * 1024


def test_parts_are_as_many_as_run_at_once():
    assert device.parts(16, 28) == 7
    assert device.parts(132, 28) == device.parts(133, 28) == 1


@pytest.mark.parametrize("stages", [1, 2, 6, 7])
def test_the_next_stage_of_a_ring_is_the_remainder(stages):
    stage = jnp.int32(0)
    for n in range(1, 3 * stages):
        stage = access.next_stage(stage, stages)
        assert stage == n % stages

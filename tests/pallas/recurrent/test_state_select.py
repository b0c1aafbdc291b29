"""state_select, and its kernel, against indexing by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import GDN
from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.state_select import state_select
from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel


def test_the_state_after_the_last_accepted_token_is_kept():
    states = np.random.default_rng(0).normal(size=(2, 5, 4, 3, 2)).astype(np.float32)
    slots, offset = np.array([3, 1, 4], np.int32), np.array([0, 3, 2], np.int32)
    actual = state_select(jnp.asarray(states), 1, jnp.asarray(slots), jnp.asarray(offset))
    np.testing.assert_array_equal(actual, states[1, slots, offset])


def test_garbage_indices_are_clamped():
    states = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    slots, offset = np.array([10**6, -7, 2], np.int32), np.array([-1, 2, 99], np.int32)
    actual = state_select(jnp.asarray(states), 0, jnp.asarray(slots), jnp.asarray(offset))
    np.testing.assert_array_equal(actual, states[0, [4, 0, 2], [0, 2, 3]])


def check(run, state, dtype):
    """Rows in range, and rows whose slot or offset is clamped; another row is all NaN."""
    states = np.random.default_rng(1).normal(size=(2, 5, 4, *state)).astype(np.float32)
    states[1, 2] = np.nan
    slots = np.array([3, 1, 10**6, -7, 2, 4], np.int32)
    offset = np.array([0, 3, 2, -1, 1, 99], np.int32)
    states = jnp.asarray(states, dtype)
    actual = run(states, 1, jnp.asarray(slots), jnp.asarray(offset))
    assert actual.dtype == states.dtype
    expected = np.asarray(states, np.float32)[1, [3, 1, 4, 0, 2, 4], [0, 3, 2, 0, 1, 3]]
    np.testing.assert_array_equal(np.asarray(actual, np.float32), expected)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("dtype", "state"),
    [(jnp.float32, (2, 32, 64)), (jnp.bfloat16, (3, 32, 64)), (jnp.float16, (2, 16, 64))],
)
def test_the_kernel_selects_alike_without_races(dtype, state):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)

    def run(states, layer, *index):
        return state_select_kernel(states, jnp.int32(layer), *index, interpret=interpret)

    check(run, state, dtype)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_on_a_gpu_op_and_kernel_select_alike(shape, dtype):
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    check(jax.jit(state_select, static_argnums=1), state, dtype)
    check(lambda x, layer, *index: state_select_kernel(x, jnp.int32(layer), *index), state, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "runs"),
    [(jnp.bfloat16, "kernel"), (jnp.float32, "XLA: its gather is as fast in float32")],
)
def test_on_a_gpu_the_faster_one_is_seen_to_run(dtype, runs):
    dispatch._chosen.pop("state_select", None)
    check(state_select, (2, 32, 64), dtype)
    assert dispatch.implementations()["state_select"] == (runs,)

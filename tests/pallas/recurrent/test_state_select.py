"""state_select and its kernel against indexing by hand; sm_90a code without spills."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regions import decode_region, prefill_region
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN
from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.state_select import state_select, state_write_reference
from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user


def test_the_state_after_the_last_accepted_token_is_kept():
    states = np.random.default_rng(0).normal(size=(2, 5, 4, 3, 2)).astype(np.float32)
    slots, offset = [3, 1, 4], [0, 3, 2]
    expected = states[1, slots, offset]
    rows = decode_region(slots, 1, state_offset=offset)
    np.testing.assert_array_equal(state_select(jnp.asarray(states), 1, rows), expected)
    chunks = prefill_region(slots, [0, 1, 2, 3], state_offset=offset)
    np.testing.assert_array_equal(state_select(jnp.asarray(states), 1, chunks), expected)


def test_garbage_indices_are_clamped():
    states = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    rows = decode_region([10**6, -7, 2], 1, state_offset=[-1, 2, 99])
    actual = state_select(jnp.asarray(states), 0, rows)
    np.testing.assert_array_equal(actual, states[0, [4, 0, 2], [0, 2, 3]])


def test_states_are_written_for_real_tokens_of_live_rows_alone():
    rng = np.random.default_rng(2)
    states = rng.normal(size=(2, 5, 3, 2)).astype(np.float32)
    after = rng.normal(size=(6, 3, 2)).astype(np.float32)
    after[0, 2:], after[2:] = np.nan, np.nan  # padding
    rows = decode_region([3, 1, 4, 0, -1, 9], [2, 5, 0, 3, 3, 3])
    written = state_write_reference(jnp.asarray(states), 1, rows, jnp.asarray(after))
    expected = states.copy()
    expected[1, 3, :2], expected[1, 1] = after[0, :2], after[1]
    np.testing.assert_array_equal(written, expected)


def check(run, state, dtype):
    """Rows in range, and rows whose slot or offset is clamped; another row is all NaN."""
    states = np.random.default_rng(1).normal(size=(2, 5, 4, *state)).astype(np.float32)
    states[1, 2] = np.nan
    rows = decode_region([3, 1, 10**6, -7, 2, 4], 1, state_offset=[0, 3, 2, -1, 1, 99])
    states = jnp.asarray(states, dtype)
    actual = run(states, 1, rows)
    assert actual.dtype == states.dtype
    expected = np.asarray(states, np.float32)[1, [3, 1, 4, 0, 2, 4], [0, 3, 2, 0, 1, 3]]
    np.testing.assert_array_equal(np.asarray(actual, np.float32), expected)


@pytest.mark.parametrize(
    ("dtype", "state"),
    [(jnp.float32, (2, 32, 64)), (jnp.bfloat16, (3, 32, 64)), (jnp.float16, (2, 16, 64))],
)
def test_the_kernel_selects_alike_without_races(interpreter, dtype, state):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(states, layer, rows):
        return state_select_kernel(states, jnp.int32(layer), rows, interpret=interpreter)

    check(run, state, dtype)
    assert not get_races().races_found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_the_kernel_compiles(h200, monkeypatch, capfd, shape, dtype):
    def step(states, rows):
        return state_select_kernel(states, jnp.int32(1), rows)

    rows = DecodeRegion(*[array(4, dtype=jnp.int32)] * 5)
    states = array(2, 9, 4, shape.value_heads, shape.value_dim, shape.key_dim, dtype=dtype)
    compiled = compile_for(h200, monkeypatch, step, (states, rows))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_on_a_gpu_op_and_kernel_select_alike(shape, dtype):
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    check(jax.jit(state_select, static_argnums=1), state, dtype)
    check(lambda x, layer, rows: state_select_kernel(x, jnp.int32(layer), rows), state, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "runs"),
    [(jnp.bfloat16, "kernel"), (jnp.float32, "XLA: its gather is as fast in float32")],
)
def test_on_a_gpu_the_faster_one_is_seen_to_run(dtype, runs):
    dispatch._chosen.pop("state_select", None)
    check(state_select, (2, 32, 64), dtype)
    assert dispatch.implementations()["state_select"] == (runs,)

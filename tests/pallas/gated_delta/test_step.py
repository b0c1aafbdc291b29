"""gdn_step against the recurrence in float64, and its kernel against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import int32, operands, oracle

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.step import gdn_step, gdn_step_reference
from jaxspec.pallas.gated_delta.step_kernel import gdn_step_kernel

LAYERS, SLOTS, CANDIDATES = 2, 5, 4
POOL = (LAYERS, SLOTS, CANDIDATES, 6, 5, 8)  # of `gated_delta.SMALL`

step = jax.jit(gdn_step, static_argnums=6)
reference = jax.jit(gdn_step_reference, static_argnums=6)


def test_a_state_rolled_back_equals_a_state_never_advanced():
    rng = np.random.default_rng(0)
    states = jnp.zeros(POOL)
    true = {slot: np.zeros(POOL[3:]) for slot in (1, 3, 4)}
    offset = dict.fromkeys(true, 0)
    for _ in range(20):
        rows = rng.permutation(list(true))  # rows may change every step; slots stay
        query_len = rng.integers(0, CANDIDATES + 1, size=3)
        tokens = operands(rng, 3, CANDIDATES)
        out, states = step(
            *tokens, states, 1, int32(*rows), int32(*(offset[r] for r in rows)), int32(*query_len)
        )
        for row, slot in enumerate(rows):
            if real := query_len[row]:
                expected, after = oracle(true[slot], *(x[row, :real] for x in tokens))
                np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
                offset[slot] = int(rng.integers(0, real))  # drafts accepted
                true[slot] = after[offset[slot]]
                np.testing.assert_allclose(states[1, slot, offset[slot]], true[slot], atol=1e-5)
    assert not np.any(states[0])


@pytest.mark.parametrize("width", range(1, 10))
def test_all_tokens_at_once_equal_one_after_the_other(width):
    rng = np.random.default_rng(width)
    states = jnp.asarray(rng.normal(size=(1, 4, width, *POOL[3:])), jnp.float32)
    tokens = operands(rng, 3, width)
    index = int32(3, 1, 2), int32(width - 1, 0, width // 2), int32(width, 1, width // 2)
    out, after = step(*tokens, states, 0, *index)
    want, expected = reference(*tokens, states, 0, *index)
    for row, count in enumerate(index[2]):
        np.testing.assert_allclose(out[row, :count], want[row, :count], atol=2e-6)
    np.testing.assert_allclose(after, expected, atol=2e-6)


def test_a_token_that_overflows_harms_no_token_before_it():
    rng = np.random.default_rng(5)
    states = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    tokens = operands(rng, 1, CANDIDATES)
    index = int32(2), int32(0), int32(CANDIDATES)
    want, expected = step(*tokens, states, 1, *index)
    for x in tokens[1:]:
        hurt = [y.copy() for y in tokens]
        hurt[[y is x for y in tokens].index(True)][0, 2] = np.nan
        out, after = step(*hurt, states, 1, *index)
        np.testing.assert_allclose(out[0, :2], want[0, :2], atol=1e-6)
        np.testing.assert_allclose(after[1, 2, :2], expected[1, 2, :2], atol=1e-6)
        assert np.isnan(after[1, 2, 2:]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("decay", [300.0, 1e5, np.inf])
def test_a_strong_decay_keeps_what_follows_exact(decay):
    rng = np.random.default_rng(6)
    states = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    tokens = operands(rng, 1, CANDIDATES)
    tokens[3][0, 1] = -decay
    index = int32(2), int32(0), int32(CANDIDATES)
    out, after = step(*tokens, states, 1, *index)
    want, expected = oracle(np.asarray(states[1, 2, 0]), *(x[0] for x in tokens))
    np.testing.assert_allclose(out[0], want, atol=1e-6)
    np.testing.assert_allclose(after[1, 2], expected, atol=1e-6)


def test_padding_is_inert():
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = [jnp.full_like(x, jnp.nan) for x in operands(rng, 5, CANDIDATES)]
    garbage = int32(10**6, -5, 2**31 - 1, -(2**31), 7)
    slots, query_len = int32(0, 0, 3, -2, 10**6), int32(4, 0, 0, 4, 4)
    _, after = step(*tokens, jnp.asarray(states), 1, slots, garbage, query_len)
    np.testing.assert_array_equal(after, states)


def test_a_padding_token_is_never_stored():
    rng = np.random.default_rng(2)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = operands(rng, 2, CANDIDATES)
    for x in tokens:
        x[0, 2:] = np.nan  # row 0 has two tokens
        x[1] = np.nan  # row 1 is padding
    out, after = step(*tokens, jnp.asarray(states), 1, int32(2, 0), int32(0, 0), int32(2, 4))
    assert np.isfinite(after).all() and np.isfinite(out[0, :2]).all()
    np.testing.assert_array_equal(after[1, 2, 2:], states[1, 2, 2:])


def test_more_tokens_than_candidates_are_refused():
    tokens = operands(np.random.default_rng(0), 1, CANDIDATES + 1)
    with pytest.raises(ValueError, match="num_drafts >= 4"):
        gdn_step(*tokens, jnp.zeros(POOL), 0, *[int32(1)] * 3)


# The kernel. Rows: three tokens, two tokens; padding by slot, by length, by a slot that is not
# there, by a negative one; one token with an offset out of range, one with a length out of range.
ROWS = {
    "slots": int32(2, 4, 0, 3, 9, -1, 6, 1),
    "offset": int32(1, 0, 7, 1, 2, 0, 10**6, -3),
    "query_len": int32(3, 2, 3, 0, 3, 3, 1, 99),
}
REAL = {0: 3, 1: 2, 6: 1, 7: 99}  # tokens of the rows that are not padding


def kernel_case(shape, dtype, width, seed=0):
    """Operands with NaN in every padding token and row, and in row 0's neighbour 1."""
    rng = np.random.default_rng(seed)
    tokens = operands(rng, len(ROWS["slots"]), width, shape=shape)
    for x in tokens:
        for row in range(len(x)):
            x[row, REAL.get(row, 0) :] = np.nan
        x[1] = np.nan
    pool = (LAYERS, 7, 4 if width <= 4 else 8, shape.value_heads, shape.value_dim, shape.key_dim)
    return tokens, jnp.asarray(rng.normal(size=pool) * 0.3, dtype)


def check(tokens, states, run):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    width, tolerance = tokens[0].shape[1], 8 * float(jnp.finfo(states.dtype).eps)
    before = np.asarray(states, np.float32)
    expected, after_reference = reference(*tokens, states, 1, *ROWS.values())
    out, after = (np.asarray(x, np.float32) for x in run(*tokens, states, 1, *ROWS.values()))
    untouched = np.ones(before.shape[:3], bool)
    for row, count in REAL.items():
        count, slot = min(count, width), int(ROWS["slots"][row])
        untouched[1, slot, :count] = False
        ours, theirs = after[1, slot, :count], np.asarray(after_reference[1, slot, :count])
        if row == 1:  # all its inputs are NaN
            assert np.isnan(ours).all() and np.isnan(out[row, :count]).all()
            continue
        np.testing.assert_allclose(out[row, :count], expected[row, :count], rtol=0, atol=2e-6)
        np.testing.assert_allclose(ours, theirs.astype(np.float32), rtol=tolerance, atol=2e-6)
    np.testing.assert_array_equal(after[untouched], before[untouched])
    padding = [row for row in range(len(out)) if row not in REAL]
    assert not np.any(out[padding])  # no uninitialised memory comes out


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("dtype", "value_dim", "key_dim", "width"),
    [
        (jnp.float32, 64, 128, 3),
        (jnp.float32, 128, 128, 4),
        (jnp.bfloat16, 128, 128, 5),
        (jnp.float32, 128, 64, 1),
        (jnp.float32, 64, 64, 8),
        (jnp.bfloat16, 64, 128, 4),
        (jnp.bfloat16, 64, 64, 2),
        (jnp.float16, 64, 128, 3),
    ],
)
def test_the_kernel_equals_its_reference_without_races(dtype, value_dim, key_dim, width):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpret = plgpu.InterpretGPUParams(detect_races=True)

    def run(*args):
        layer = jnp.asarray(args[6], jnp.int32)
        return gdn_step_kernel(*args[:6], layer, *args[7:], interpret=interpret)

    shape = GdnShape(2, 4, key_dim=key_dim, value_dim=value_dim)
    check(*kernel_case(shape, dtype, width), run)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    dispatch._chosen.pop("gdn_step", None)
    run = jax.jit(lambda *args: gdn_step(*args[:6], 1, *args[7:]))
    check(*kernel_case(shape, dtype, width, seed=width), run)
    assert dispatch.implementations()["gdn_step"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_float32_is_float32():
    rng, shape = np.random.default_rng(3), GDN["qwen3.5-9b"]
    tokens = operands(rng, 2, 4, shape=shape)
    pool = (1, 3, 4, shape.value_heads, shape.value_dim, shape.key_dim)
    states = rng.normal(size=pool).astype(np.float32)
    indices = int32(2, 1), int32(3, 0), int32(4, 4)
    out, after = jax.jit(gdn_step, static_argnums=6)(*tokens, jnp.asarray(states), 0, *indices)
    for row, (slot, offset) in enumerate(((2, 3), (1, 0))):
        expected, expected_after = oracle(states[0, slot, offset], *(x[row] for x in tokens))
        for ours, exact in ((out[row], expected), (after[0, slot], expected_after)):
            error = np.linalg.norm(np.asarray(ours, np.float64) - exact) / np.linalg.norm(exact)
            assert error < 1e-6

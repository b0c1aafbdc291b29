"""gdn_step against the recurrence in float64, and its kernel against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import SMALL, operands, oracle
from regions import decode_region

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.step import gdn_step, gdn_step_reference
from jaxspec.pallas.gated_delta.step_kernel import gdn_step_kernel

LAYERS, SLOTS, CANDIDATES = 2, 5, 4
POOL = (LAYERS, SLOTS, CANDIDATES, 6, 5, 8)  # of `gated_delta.SMALL`

step = jax.jit(gdn_step, static_argnums=2)
reference = jax.jit(gdn_step_reference, static_argnums=2)


def draw_tokens(rng, *batch, shape=SMALL):
    """Tokens as a layer makes them, in NumPy arrays that a test may change."""
    return GdnTokens(*operands(rng, *batch, shape=shape))


def test_a_state_rolled_back_equals_a_state_never_advanced():
    rng = np.random.default_rng(0)
    states = jnp.zeros(POOL)
    true = {slot: np.zeros(POOL[3:]) for slot in (1, 3, 4)}
    offset = dict.fromkeys(true, 0)
    for _ in range(20):
        slots = rng.permutation(list(true))  # rows may change every step; slots stay
        query_len = rng.integers(0, CANDIDATES + 1, size=3)
        tokens = draw_tokens(rng, 3, CANDIDATES)
        region = decode_region(slots, query_len, state_offset=[offset[slot] for slot in slots])
        out, states = step(tokens, states, 1, region)
        for row, slot in enumerate(slots):
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
    tokens = draw_tokens(rng, 3, width)
    query_len = [width, 1, width // 2]
    rows = decode_region([3, 1, 2], query_len, state_offset=[width - 1, 0, width // 2])
    out, after = step(tokens, states, 0, rows)
    want, expected = reference(tokens, states, 0, rows)
    for row, count in enumerate(query_len):
        np.testing.assert_allclose(out[row, :count], want[row, :count], atol=2e-6)
    np.testing.assert_allclose(after, expected, atol=2e-6)


def test_a_token_that_overflows_harms_no_token_before_it():
    rng = np.random.default_rng(5)
    states = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    tokens, rows = draw_tokens(rng, 1, CANDIDATES), decode_region([2], CANDIDATES)
    want, expected = step(tokens, states, 1, rows)
    for field in ("k", "v", "g", "beta"):
        hurt = getattr(tokens, field).copy()
        hurt[0, 2] = np.nan
        out, after = step(tokens._replace(**{field: hurt}), states, 1, rows)
        np.testing.assert_allclose(out[0, :2], want[0, :2], atol=1e-6)
        np.testing.assert_allclose(after[1, 2, :2], expected[1, 2, :2], atol=1e-6)
        assert np.isnan(after[1, 2, 2:]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("decay", [300.0, 1e5, np.inf])
def test_a_strong_decay_keeps_what_follows_exact(decay):
    rng = np.random.default_rng(6)
    states = jnp.asarray(rng.normal(size=POOL), jnp.float32)
    tokens = draw_tokens(rng, 1, CANDIDATES)
    tokens.g[0, 1] = -decay
    out, after = step(tokens, states, 1, decode_region([2], CANDIDATES))
    want, expected = oracle(np.asarray(states[1, 2, 0]), *(x[0] for x in tokens))
    np.testing.assert_allclose(out[0], want, atol=1e-6)
    np.testing.assert_allclose(after[1, 2], expected, atol=1e-6)


def test_padding_is_inert():
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draw_tokens(rng, 5, CANDIDATES))
    garbage = [10**6, -5, 2**31 - 1, -(2**31), 7]
    rows = decode_region([0, 0, 3, -2, 10**6], [4, 0, 0, 4, 4], state_offset=garbage)
    _, after = step(tokens, jnp.asarray(states), 1, rows)
    np.testing.assert_array_equal(after, states)


def test_a_padding_token_is_never_stored():
    rng = np.random.default_rng(2)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = draw_tokens(rng, 2, CANDIDATES)
    for x in tokens:
        x[0, 2:] = np.nan  # row 0 has two tokens
        x[1] = np.nan  # row 1 is padding
    out, after = step(tokens, jnp.asarray(states), 1, decode_region([2, 0], [2, 4]))
    assert np.isfinite(after).all() and np.isfinite(out[0, :2]).all()
    np.testing.assert_array_equal(after[1, 2, 2:], states[1, 2, 2:])


def test_more_tokens_than_candidates_are_refused():
    tokens = draw_tokens(np.random.default_rng(0), 1, CANDIDATES + 1)
    with pytest.raises(ValueError, match="num_drafts >= 4"):
        gdn_step(tokens, jnp.zeros(POOL), 0, decode_region([1], 1))


# The kernel. Rows: three tokens, two tokens; padding by slot, by length, by a slot that is not
# there, by a negative one; one token with an offset out of range, one with a length out of range.
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99],
    state_offset=[1, 0, 7, 1, 2, 0, 10**6, -3],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99}  # row -> its tokens, for the rows that are not padding


def kernel_case(shape, dtype, width, seed=0):
    """Tokens and pool; padding tokens and rows are NaN, and so is row 1, beside row 0."""
    rng = np.random.default_rng(seed)
    tokens = draw_tokens(rng, len(ROWS.slots), width, shape=shape)
    for x in tokens:
        for row in range(len(x)):
            x[row, REAL.get(row, 0) :] = np.nan
        x[1] = np.nan
    pool = (LAYERS, 7, 4 if width <= 4 else 8, shape.value_heads, shape.value_dim, shape.key_dim)
    return tokens, jnp.asarray(rng.normal(size=pool) * 0.3, dtype)


def check(tokens, states, run):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    width, tolerance = tokens.q.shape[1], 8 * float(jnp.finfo(states.dtype).eps)
    before = np.asarray(states, np.float32)
    expected, after_reference = reference(tokens, states, 1, ROWS)
    out, after = (np.asarray(x, np.float32) for x in run(tokens, states, 1, ROWS))
    untouched = np.ones(before.shape[:3], bool)
    for row, count in REAL.items():
        count, slot = min(count, width), int(ROWS.slots[row])
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
def test_the_kernel_equals_its_reference_without_races(
    interpreter, dtype, value_dim, key_dim, width
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(tokens, states, layer, rows):
        return gdn_step_kernel(tokens, states, jnp.int32(layer), rows, interpret=interpreter)

    shape = GdnShape(2, 4, key_dim=key_dim, value_dim=value_dim)
    check(*kernel_case(shape, dtype, width), run)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    dispatch._chosen.pop("gdn_step", None)
    check(*kernel_case(shape, dtype, width, seed=width), step)
    assert dispatch.implementations()["gdn_step"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_float32_is_float32():
    rng, shape = np.random.default_rng(3), GDN["qwen3.5-9b"]
    tokens = draw_tokens(rng, 2, 4, shape=shape)
    pool = (1, 3, 4, shape.value_heads, shape.value_dim, shape.key_dim)
    states = rng.normal(size=pool).astype(np.float32)
    rows = decode_region([2, 1], 4, state_offset=[3, 0])
    out, after = step(tokens, jnp.asarray(states), 0, rows)
    for row, (slot, offset) in enumerate(((2, 3), (1, 0))):
        expected, expected_after = oracle(states[0, slot, offset], *(x[row] for x in tokens))
        for ours, exact in ((out[row], expected), (after[0, slot], expected_after)):
            error = np.linalg.norm(np.asarray(ours, np.float64) - exact) / np.linalg.norm(exact)
            assert error < 1e-6

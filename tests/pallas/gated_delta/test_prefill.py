"""gdn_prefill, chunked, against the token-by-token reference, and that against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import operands as tokens_of
from regions import prefill_region

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.prefill import gdn_prefill, gdn_prefill_reference
from jaxspec.pallas.gated_delta.prefill_kernel import gdn_prefill_kernel
from jaxspec.pallas.gpu import device

LAYERS, SLOTS, CANDIDATES, KEY_HEADS, VALUE_HEADS, VALUE_DIM, KEY_DIM = 2, 6, 3, 2, 4, 5, 8
POOL = (LAYERS, SLOTS, CANDIDATES, VALUE_HEADS, VALUE_DIM, KEY_DIM)
TOKENS = 200

chunked = jax.jit(gdn_prefill, static_argnums=2)
sequential = jax.jit(gdn_prefill_reference, static_argnums=2)


def draw_tokens(rng, decay):
    q, k = (rng.normal(size=(TOKENS, KEY_HEADS, KEY_DIM)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(TOKENS, VALUE_HEADS, VALUE_DIM))
    g = -decay * rng.exponential(size=(TOKENS, VALUE_HEADS)) ** 3
    beta = rng.random(size=(TOKENS, VALUE_HEADS))
    return GdnTokens(*(x.astype(np.float32) for x in (q, k, v, g, beta)))


def oracle(state, q, k, v, g, beta):
    """Outputs and the last state, in float64."""
    state, outputs, group = state.astype(np.float64), [], VALUE_HEADS // KEY_HEADS
    for t in range(len(q)):
        key, query = (np.repeat(x[t].astype(np.float64), group, axis=0) for x in (k, q))
        state = np.exp(g[t].astype(np.float64))[:, None, None] * state
        write = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, key))
        state = state + write[:, :, None] * key[:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, query))
    return np.array(outputs).reshape(-1, VALUE_HEADS, VALUE_DIM), state


LENGTHS = [
    [200, 0, 0, 0, 0],
    [64, 64, 1, 63, 8],
    [65, 0, 127, 3, 5],
    [1, 2, 3, 4, 5],
    [0, 0, 0, 0, 0],
]


@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_both_forms_equal_the_recurrence(lengths, decay):
    rng = np.random.default_rng(0)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = draw_tokens(rng, decay)
    start = np.concatenate([[0], np.cumsum(lengths)])
    for x in tokens:
        x[start[-1] :] = np.nan  # padding
    slots, offset, computed = [1, 5, 2, 4, 3], [0, 2, 1, 0, 2], [0, 9, 0, 4, 1]
    expected, pool = np.zeros(tokens.v.shape), states.astype(np.float64)
    for seq, slot in enumerate(slots):
        own = slice(start[seq], start[seq + 1])
        initial = states[1, slot, offset[seq]] if computed[seq] else np.zeros(POOL[3:])
        expected[own], final = oracle(initial, *(x[own] for x in tokens))
        if lengths[seq]:
            pool[1, slot, 0] = final
    chunks = prefill_region(slots, start, num_computed=computed, state_offset=offset)
    for form in (sequential, chunked):
        out, after = form(tokens, jnp.asarray(states), 1, chunks)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_allclose(after, pool, atol=1e-5)


@pytest.mark.parametrize("form", [sequential, chunked])
def test_padding_is_inert(form):
    rng = np.random.default_rng(1)
    states = rng.normal(size=POOL).astype(np.float32)
    tokens = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draw_tokens(rng, 1.0))
    slots, start, garbage = [0, -2, 3, 10**6], [0, 70, 80, 80, 90], [10**6, -5, 2**31 - 1, -(2**31)]
    chunks = prefill_region(slots, start, num_computed=garbage, state_offset=garbage)
    out, after = form(tokens, jnp.asarray(states), 1, chunks)
    np.testing.assert_array_equal(after, states)
    np.testing.assert_array_equal(out, np.zeros(out.shape))


@pytest.mark.parametrize("form", [sequential, chunked])
def test_values_may_come_in_the_dtype_of_the_model(form):
    tokens = draw_tokens(np.random.default_rng(2), 1.0)
    v, chunks = jnp.asarray(tokens.v, jnp.bfloat16), prefill_region([2, 3], [0, 70, 90])
    narrow = form(tokens._replace(v=v), jnp.zeros(POOL), 1, chunks)
    wide = form(tokens._replace(v=v.astype(jnp.float32)), jnp.zeros(POOL), 1, chunks)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, theirs)


# The kernel. Sequences, from token 3 on: a chunk and a bit that begins its prompt, less than a
# chunk, none, one whose inputs are all NaN, padding by slot, four chunks, padding by a slot that
# is not there.
LENGTH = [70, 5, 0, 20, 9, 200, 7]
START = 3 + np.concatenate([[0], np.cumsum(LENGTH)])
SEQUENCES = prefill_region(
    slots=[3, 2, 1, 5, 0, 4, 10**6],
    query_start=START,
    num_computed=[0, 9, 3, 5, 10**6, 64, -1],
    state_offset=[10**6, 1, 0, 0, -5, -(2**31), 7],
)
REAL, POISONED = (0, 1, 5), 3


def kernel_case(shape, dtype, states_dtype, alike=False, seed=0):
    """Tokens and pool; padding tokens are NaN, and two decays leave nothing of the state.

    `alike`: keys and queries resemble each other, and are written and kept at full strength.
    """
    rng = np.random.default_rng(seed)
    tokens = GdnTokens(*tokens_of(rng, -(-(START[-1] + 11) // 8) * 8, shape=shape))
    if alike:
        for x in (tokens.q, tokens.k):
            x += 2 * rng.normal(size=x.shape[-1]) / np.sqrt(x.shape[-1])
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
        tokens.g[:], tokens.beta[:] = 0.0, 1.0
    else:
        tokens.g[START[0] + 40], tokens.g[START[5] + 80] = -1e5, -np.inf
    real = np.zeros(len(tokens.q), bool)
    for seq in REAL:
        real[START[seq] : START[seq + 1]] = True
    for x in tokens:
        x[~real] = np.nan
    # Rounded as the kernel rounds them, so that the reference starts from the same.
    q, k = (jnp.asarray(x, dtype).astype(jnp.float32) for x in (tokens.q, tokens.k))
    pool = (LAYERS, 6, CANDIDATES, shape.value_heads, shape.value_dim, shape.key_dim)
    states = jnp.asarray(rng.normal(size=pool) * 0.3, states_dtype)
    return tokens._replace(q=q, k=k, v=jnp.asarray(tokens.v, dtype)), states


def error(ours, exact):
    ours, exact = (np.asarray(x, np.float64) for x in (ours, exact))
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def check(tokens, states, run, alike=False):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    expected, expected_pool = sequential(tokens, states, 1, SEQUENCES)
    out, after = (np.asarray(x, np.float32) for x in run(tokens, states, 1, SEQUENCES))
    bound = 1e-2 if tokens.v.dtype == jnp.bfloat16 else 1.5e-3
    rounding = 0.0 if states.dtype == jnp.float32 else float(jnp.finfo(states.dtype).eps)
    untouched, padding = np.ones(states.shape[:3], bool), np.ones(len(out), bool)
    for seq in (*REAL, POISONED):
        own, slot = slice(START[seq], START[seq + 1]), int(SEQUENCES.slots[seq])
        untouched[1, slot, 0], padding[own] = False, False
        if seq == POISONED:
            assert np.isnan(out[own]).all() and np.isnan(after[1, slot, 0]).all()
            continue
        assert error(out[own], expected[own]) < bound * (3 if alike else 1)
        state_bound = (bound / 2 + rounding) * (3 if alike else 1)
        assert error(after[1, slot, 0], expected_pool[1, slot, 0]) < state_bound
    np.testing.assert_array_equal(after[untouched], np.asarray(states, np.float32)[untouched])
    assert not np.any(out[padding])


@pytest.mark.parametrize(
    ("dtype", "states_dtype", "value_dim", "key_dim", "alike", "multiprocessors"),
    [
        (jnp.bfloat16, jnp.float32, 64, 128, False, 132),
        (jnp.bfloat16, jnp.float32, 128, 128, False, 132),
        (jnp.bfloat16, jnp.bfloat16, 128, 64, False, 132),
        (jnp.float16, jnp.float16, 64, 64, False, 4),  # two blocks on each
        (jnp.bfloat16, jnp.float32, 64, 64, True, 132),
    ],
)
def test_the_kernels_equal_their_reference_without_races(
    interpreter, monkeypatch, dtype, states_dtype, value_dim, key_dim, alike, multiprocessors
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    monkeypatch.setattr(device, "MULTIPROCESSORS", multiprocessors)

    def run(tokens, states, layer, chunks):
        return gdn_prefill_kernel(tokens, states, jnp.int32(layer), chunks, interpret=interpreter)

    shape = GdnShape(1, 2, key_dim=key_dim, value_dim=value_dim)
    check(*kernel_case(shape, dtype, states_dtype, alike), run, alike)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("states_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 2, 64, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernels_and_equals_its_reference(shape, dtype, states_dtype):
    dispatch._chosen.pop("gdn_prefill", None)
    for alike in (False, True):
        check(*kernel_case(shape, dtype, states_dtype, alike), chunked, alike)
    assert dispatch.implementations()["gdn_prefill"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048], [1, 2047], [512] * 4, [1000, 1, 7, 8, 1032]], ids=str)
def test_on_a_gpu_long_sequences_stay_exact(lengths):
    rng, shape = np.random.default_rng(7), GDN["qwen3.5-9b"]
    q, k, v, g, beta = tokens_of(rng, 2048, shape=shape)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    tokens = GdnTokens(q, k, v, g * 0.05, beta)  # the decay of a head that forgets slowly
    seqs = len(lengths)
    pool = (1, seqs + 1, 2, shape.value_heads, shape.value_dim, shape.key_dim)
    states = jnp.asarray(rng.normal(size=pool), jnp.float32)
    start, computed = [0, *np.cumsum(lengths)], range(seqs)
    slots = range(1, seqs + 1)
    chunks = prefill_region(slots, start, num_computed=computed, state_offset=1)
    expected, expected_pool = sequential(tokens, states, 0, chunks)
    for _ in range(3):  # a race shows now and then
        out, after = chunked(tokens, states, 0, chunks)
        assert error(out, expected) < 1e-2
        assert error(after[0, 1:, 0], expected_pool[0, 1:, 0]) < 5e-3
        np.testing.assert_array_equal(after[0, :, 1], states[0, :, 1])

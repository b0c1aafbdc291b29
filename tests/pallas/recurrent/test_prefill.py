"""Prefill of both recurrences, chunked and token by token, against float64, and their kernels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN, KDA, MAMBA2, REPLAYED, at, every, spoil
from regions import decode_region, prefill_region

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.recurrent.chunks import unit_lower_inverse

LAYERS, SLOTS, CANDIDATES, TOKENS = 2, 6, 3, 200

LENGTHS = [
    [200, 0, 0, 0, 0],
    [64, 64, 1, 63, 8],
    [65, 0, 127, 3, 5],
    [1, 2, 3, 4, 5],
    [0, 0, 0, 0, 0],
]

all_forms = pytest.mark.parametrize("form", ["reference", "run", "side_by_side"])


def pool_of(family):
    """The dimensions of a pool for small states."""
    return LAYERS, SLOTS, CANDIDATES, *family.state(family.small)


def form_of(family, name):
    """The function of a form; the one for gradients runs all sequences side by side."""
    if name != "side_by_side":
        return getattr(family.prefill, name)

    def run(tokens, *arguments):
        with dispatch.reference(longest=len(tokens[0])):
            return family.prefill.run(tokens, *arguments)

    return run


@pytest.mark.few(5)
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@every
def test_all_forms_equal_the_recurrence(family, lengths, decay):
    """Decays of neighbours differ a hundredfold."""
    rng, pool = np.random.default_rng(0), pool_of(family)
    states = rng.normal(size=pool).astype(np.float32)
    tokens = family.draw(rng, TOKENS)
    family.scale(tokens, np.float32(decay * rng.exponential(size=(TOKENS, pool[3])) ** 2))
    start = np.concatenate([[0], np.cumsum(lengths)])
    spoil(tokens, np.s_[start[-1] :])  # padding
    slots, offset, computed = [1, 5, 2, 4, 3], [0, 2, 1, 0, 2], [0, 9, 0, 4, 1]
    expected, kept = np.zeros(getattr(tokens, family.value).shape), states.astype(np.float64)
    for seq, slot in enumerate(slots):
        own = np.s_[start[seq] : start[seq + 1]]
        initial = states[1, slot, offset[seq]] if computed[seq] else np.zeros(pool[3:])
        if lengths[seq]:
            expected[own], after = family.oracle(initial, *at(tokens, own))
            kept[1, slot, 0] = after[-1]
    chunks = prefill_region(slots, start, num_computed=computed, state_offset=offset)
    error = 2e-5 if family is MAMBA2 else 1e-5
    for form in ("reference", "run", "side_by_side"):
        out, after = form_of(family, form)(tokens, jnp.asarray(states), 1, chunks)
        np.testing.assert_allclose(out, expected, atol=error)
        np.testing.assert_allclose(after, kept, atol=error)


@every
def test_a_prefill_is_as_many_steps(family):
    rng, lengths, width = np.random.default_rng(3), [9, 4, 7], 9
    pool = (LAYERS, SLOTS, width, *family.state(family.small))
    states = jnp.asarray(rng.normal(size=pool), jnp.float32)
    rectangle = family.draw(rng, len(lengths), width)
    slots, offset = [2, 5, 1], [0, 3, 8]
    rows = decode_region(slots, lengths, state_offset=offset)
    want, by_steps = family.step.run(rectangle, states, 1, rows)
    tokens = at(rectangle, np.arange(width) < np.asarray(lengths)[:, None])
    start = np.cumsum([0, *lengths])
    chunks = prefill_region(slots, start, num_computed=1, state_offset=offset)
    out, after = family.prefill.run(tokens, states, 1, chunks)
    for row, count in enumerate(lengths):
        own, slot = out[start[row] : start[row + 1]], slots[row]
        np.testing.assert_allclose(own, want[row, :count], atol=1e-5)
        np.testing.assert_allclose(after[1, slot, 0], by_steps[1, slot, count - 1], atol=1e-5)


@pytest.mark.few(3)
@all_forms
@every
def test_padding_is_inert(family, form):
    rng = np.random.default_rng(1)
    states = rng.normal(size=pool_of(family)).astype(np.float32)
    tokens = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), family.draw(rng, TOKENS))
    slots, start, garbage = [0, -2, 3, 10**6], [0, 70, 80, 80, 90], [10**6, -5, 2**31 - 1, -(2**31)]
    chunks = prefill_region(slots, start, num_computed=garbage, state_offset=garbage)
    out, after = form_of(family, form)(tokens, jnp.asarray(states), 1, chunks)
    np.testing.assert_array_equal(after, states)
    np.testing.assert_array_equal(out, np.zeros(out.shape))


@pytest.mark.few(3)
@all_forms
@every
def test_tokens_may_come_in_the_dtype_of_the_model(family, form):
    tokens = family.in_dtype(family.draw(np.random.default_rng(2), TOKENS), jnp.bfloat16)
    run, chunks = form_of(family, form), prefill_region([2, 3], [0, 70, 90])
    narrow = run(tokens, jnp.zeros(pool_of(family)), 1, chunks)
    wide = run(family.in_dtype(tokens, jnp.float32), jnp.zeros(pool_of(family)), 1, chunks)
    error = 1e-5 if family is MAMBA2 else 0.0
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=error, atol=error)


@pytest.mark.few(2)
@pytest.mark.parametrize("longest", [1, 5, 40, 130])
@every
def test_the_chunks_of_a_gradient_follow_from_the_longest_text(family, longest):
    """Gradients equal those of one token after the other, with respect to tokens and states."""
    rng, lengths = np.random.default_rng(4), [longest, 1, longest // 2]
    states = jnp.asarray(rng.normal(size=pool_of(family)), jnp.float32)
    tokens = jax.tree.map(jnp.asarray, family.draw(rng, sum(lengths) + 3))
    chunks = prefill_region([1, 3, 2], np.cumsum([0, *lengths]), num_computed=[1, 0, 4])

    def gradient(form):
        def loss(tokens, states):
            with dispatch.reference(longest):
                out, after = form(tokens, states, 1, chunks)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(after))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(tokens, states)

    found, want = gradient(family.prefill.run), gradient(family.prefill.reference)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), found, want)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_of_a_chunk_stays_exact_where_keys_resemble_each_other(size):
    rng = np.random.default_rng(5)
    keys = rng.normal(size=(3, size, 16)) + 3 * rng.normal(size=(3, 1, 16))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    system = np.tril(keys @ keys.swapaxes(1, 2), -1).astype(np.float32)
    want = np.linalg.inv(np.eye(size) + system.astype(np.float64))
    np.testing.assert_allclose(unit_lower_inverse(system), want, atol=2e-6)


# The kernels. Sequences, from token 3 on: a chunk and a bit that begins its prompt, less than a
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


def kernel_case(family, shape, dtype, states_dtype, alike=False):
    """Tokens and pool; padding tokens are NaN, and two decays leave nothing of the state.

    `alike`: keys and queries resemble each other, and are written and kept at full strength.
    """
    rng = np.random.default_rng(0)
    tokens = family.draw(rng, -(-(START[-1] + 11) // 8) * 8, shape=shape)
    if alike:
        for x in (tokens.q, tokens.k):
            x += 2 * rng.normal(size=x.shape[-1]) / np.sqrt(x.shape[-1])
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
        tokens.g[:], tokens.beta[:] = 0.0, 1.0
    else:
        family.scale(tokens, np.float32(0.3 if family is MAMBA2 else 1.0))
        family.forget(tokens, START[0] + 40, 1e5)
        family.forget(tokens, START[5] + 80, family.decays[-1])
    padding = np.ones(len(tokens[0]), bool)
    for seq in REAL:
        padding[START[seq] : START[seq + 1]] = False
    spoil(tokens, padding)
    states = rng.normal(size=(LAYERS, 6, CANDIDATES, *family.state(shape)))
    states *= 1.0 if family is MAMBA2 else 0.3
    return family.in_dtype(tokens, dtype), jnp.asarray(states, states_dtype)


def error(ours, exact):
    ours, exact = (np.asarray(x, np.float64) for x in (ours, exact))
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def check(family, run, shape, dtype, states_dtype, alike=False):
    """`run` is the reference: in outputs, in states written, and in all it must not write."""
    tokens, states = kernel_case(family, shape, dtype, states_dtype, alike)
    expected, expected_pool = family.prefill.reference(tokens, states, 1, SEQUENCES)
    out, after = (np.asarray(x, np.float32) for x in run(tokens, states, 1, SEQUENCES))
    bound = 1e-2 if dtype == jnp.bfloat16 else 1.5e-3
    rounding = 0.0 if states_dtype == jnp.float32 else float(jnp.finfo(states_dtype).eps)
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
    ("family", "dtype", "states_dtype", "shape", "alike", "multiprocessors", "options"),
    [
        (GDN, jnp.bfloat16, jnp.float32, GdnShape(1, 2, 128, 64), False, 132, {}),
        (GDN, jnp.bfloat16, jnp.float32, GdnShape(1, 2, 128, 128), False, 132, {}),
        (GDN, jnp.bfloat16, jnp.bfloat16, GdnShape(1, 2, 64, 128), False, 132, {}),
        (GDN, jnp.float16, jnp.float16, GdnShape(1, 2, 64, 64), False, 4, {}),  # two blocks on each
        (GDN, jnp.bfloat16, jnp.float32, GdnShape(1, 2, 64, 64), True, 132, {}),
        (KDA, jnp.bfloat16, jnp.float32, GdnShape(2, 2, 128, 64), False, 132, {}),
        (KDA, jnp.float16, jnp.bfloat16, GdnShape(2, 2, 64, 128), False, 4, {}),
        (KDA, jnp.bfloat16, jnp.float32, GdnShape(2, 2, 64, 64), True, 132, {}),
        # No prompt is cut.
        (MAMBA2, jnp.bfloat16, jnp.float32, Mamba2Shape(2, 1, 64, 128), False, 132, {}),
        (MAMBA2, jnp.bfloat16, jnp.bfloat16, Mamba2Shape(2, 2, 128, 64), False, 132, {"tile": 64}),
        (MAMBA2, jnp.float16, jnp.float16, Mamba2Shape(4, 2, 64, 64), False, 132, {"tile": 128}),
    ],
    ids=str,
)
def test_the_kernels_equal_their_reference_without_races(
    interpreter, monkeypatch, family, dtype, states_dtype, shape, alike, multiprocessors, options
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    monkeypatch.setattr(device, "MULTIPROCESSORS", multiprocessors)

    def run(tokens, states, layer, chunks):
        operands = tokens, states, jnp.int32(layer), chunks
        return family.prefill.kernel(*operands, interpret=interpreter, **options)

    check(family, run, shape, dtype, states_dtype, alike)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("states_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((GDN, shape) for shape in (*GDN.published.values(), GdnShape(2, 2, 64, 64))),
        *((KDA, shape) for shape in (*KDA.published.values(), GdnShape(2, 2, 64, 64))),
        *((MAMBA2, shape) for shape in (*MAMBA2.published.values(), Mamba2Shape(4, 2, 128, 64))),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernels_and_equals_its_reference(
    family, shape, dtype, states_dtype
):
    """Also where Mamba2's prompts are cut, and where a delta rule's keys are alike."""

    def cut(tokens, states, layer, chunks):
        return family.prefill.kernel(tokens, states, jnp.int32(layer), chunks, tile=64)

    prefill = family.prefill
    dispatch._chosen.pop(prefill.name, None)
    others = {"mamba2": (cut, False)}
    for run, alike in ((prefill.run, False), others.get(family.name, (prefill.run, True))):
        check(family, run, shape, dtype, states_dtype, alike)
    assert dispatch.implementations()[prefill.name] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        *itertools.product(REPLAYED, [[2048], [1, 2047], [512] * 4, [1000, 1, 7, 8, 1032]]),
        (MAMBA2, [5, 3]),
    ],
    ids=str,
)
def test_on_a_gpu_sequences_of_any_length_stay_exact(family, lengths):
    """With the decay of a head that forgets slowly."""
    rng, shape = np.random.default_rng(7), family.typical
    tokens = family.draw(rng, sum(lengths), shape=shape)
    family.scale(tokens, np.float32(0.02 if family is MAMBA2 else 0.05))
    tokens, seqs = family.in_dtype(tokens, jnp.bfloat16), len(lengths)
    states = jnp.asarray(rng.normal(size=(1, seqs + 1, 2, *family.state(shape))), jnp.float32)
    start, computed = [0, *np.cumsum(lengths)], range(seqs)
    slots = range(1, seqs + 1)
    chunks = prefill_region(slots, start, num_computed=computed, state_offset=1)
    expected, expected_pool = family.prefill.reference(tokens, states, 0, chunks)
    for _ in range(3):  # a race shows now and then
        out, after = family.prefill.run(tokens, states, 0, chunks)
        assert error(out, expected) < 1e-2
        assert error(after[0, 1:, 0], expected_pool[0, 1:, 0]) < 5e-3
        np.testing.assert_array_equal(after[0, :, 1], states[0, :, 1])

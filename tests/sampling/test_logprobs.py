"""What is packed of a token, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.sampling_features import FULL, MIN_P, SamplingFeatures
from jaxspec.requests.sampling_params import MAX_LOGPROBS
from jaxspec.sampling import SamplingInputs, draw
from jaxspec.sampling.logprobs import pack_logprobs, reported_logits

PACK = jax.jit(pack_logprobs)


@pytest.mark.parametrize("vocab", [7, 264, 6000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0], ids=["flat", "as models have", "peaked"])
def test_it_is_the_log_softmax_of_the_logits(vocab, scale):
    random = np.random.default_rng(vocab)
    logits = (random.normal(size=(9, vocab)) * scale).astype(np.float32)
    logits[3] = np.round(logits[3] / scale) * scale  # many equals
    tokens = random.integers(0, vocab, 9).astype(np.int32)
    tokens[5] = -1  # nobody reads what comes of it, and it spoils nothing
    fields = LAYOUT.unpack(np.asarray(PACK(logits, tokens)))
    exact = logits.astype(np.float64)
    total = np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1))
    for row in {*range(9)} - {5}:
        own = logits[row, tokens[row]]
        assert fields["logit"][row] == own
        assert fields["rank"][row] == 1 + (logits[row] > own).sum()
        assert abs(fields["log_total"][row] - total[row]) < 1e-5
        order = np.argsort(-logits[row], kind="stable")[:MAX_LOGPROBS]
        np.testing.assert_array_equal(fields["top_ids"][row][: len(order)], order)
        np.testing.assert_array_equal(fields["top_logits"][row][: len(order)], logits[row][order])
        assert (fields["top_ids"][row][len(order) :] == -1).all()


def test_no_rows_have_no_fields():
    fields = PACK(np.zeros((0, 6000), np.float32), np.zeros(0, np.int32))
    assert fields.shape == (0, LAYOUT.size) and fields.dtype == np.int32


RICH = FULL | SamplingFeatures.of(MIN_P)
REPORTED = jax.jit(reported_logits, static_argnames="features")
DRAW = jax.jit(draw, static_argnames="features")


def rows_of(count, processed=1, **given):
    """Rows without stop ids, one seed each; others are off unless they are given."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_len": 0}
    columns = {
        name: jnp.full(count, value, jnp.int32 if name in ("top_k", "min_len") else jnp.float32)
        for name, value in (off | given).items()
    }
    columns |= {"seed": jnp.arange(count, dtype=jnp.int32), "stop_ids": jnp.zeros((count, 0))}
    columns["stop_ids"] = columns["stop_ids"].astype(jnp.int32)
    columns["reports_processed"] = jnp.full(count, processed, jnp.int32)
    return SamplingInputs(columns), jnp.zeros(count, jnp.int32)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.6, "top_k": 9},
        {"temperature": 1.7, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_logprobs_say(given):
    count, vocab = 100_000, 24
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 1.5
    inputs, positions = rows_of(1, **given)
    reported = np.asarray(REPORTED(logits[None], inputs, positions, features=RICH))[0]
    masses = np.exp(reported.astype(np.float64) - reported.max())
    wanted = count * masses / masses.sum()
    every = np.broadcast_to(logits, (count, vocab))
    tokens = np.asarray(DRAW(every, *rows_of(count, **given), features=RICH))
    counts = np.bincount(tokens, minlength=vocab)
    is_kept = wanted > 0
    assert 1 < is_kept.sum() < vocab and not counts[~is_kept].any()
    surprise = ((counts - wanted)[is_kept] ** 2 / wanted[is_kept]).sum()
    freedom = is_kept.sum() - 1
    assert surprise < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [40, 6000])
def test_a_row_that_asks_for_neither_keeps_its_logits(vocab):
    """And so does one without processors, bit for bit; a greedy row has none of these four."""
    logits = np.random.default_rng(1).normal(size=(3, vocab)).astype(np.float32)
    cut = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1}
    for rows in (
        rows_of(3, processed=0, **cut),
        rows_of(3),
        rows_of(3, **cut | {"temperature": 0.0}),
    ):
        np.testing.assert_array_equal(REPORTED(logits, *rows, features=RICH), logits)
    assert (np.asarray(REPORTED(logits, *rows_of(3, **cut), features=RICH)) == -np.inf).any()


@pytest.mark.parametrize("vocab", [40, 6000])
@pytest.mark.parametrize(
    "cut", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1}]
)
def test_a_forced_id_has_all_of_the_mass(vocab, cut):
    """The lowest of several has it, since it is the one that is drawn."""
    logits = np.random.default_rng(2).normal(size=(3, vocab)).astype(np.float32)
    logits[0, 7] = logits[1, 5] = logits[1, 9] = np.inf
    rows = rows_of(3, **cut)
    tokens = DRAW(logits, *rows, features=RICH)
    reported = REPORTED(logits, *rows, features=RICH)
    fields = LAYOUT.unpack(np.asarray(PACK(reported, tokens)))
    logprobs = fields["logit"] - fields["top_logits"][:, 0] - fields["log_total"]
    assert tokens[:2].tolist() == [7, 5] and logprobs[:2].tolist() == [0.0, 0.0]
    assert (np.asarray(reported)[:2] > -np.inf).sum() == 2 and np.isfinite(logprobs[2])

"""Block verification by exact enumeration: every sequence of drafts, every outcome of every test.

The models are trees over three ids: `p` and `q` are tables by context, so that what stands at a
place depends on all before it. `NUM` says after which contexts nothing more was drafted.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.requests.sampling_features import SAMPLED
from jaxspec.sampling import rejection
from jaxspec.sampling.rejection import excess_of, judge_block, verify_block

IDS, DRAFTS = 3, 3
SEQUENCES = list(itertools.product(range(IDS), repeat=DRAFTS))


def tables(seed, *, zeros=False):
    """A distribution for each context of up to `DRAFTS` ids."""
    random = np.random.default_rng(seed)
    contexts = [c for n in range(DRAFTS + 1) for c in itertools.product(range(IDS), repeat=n)]
    found = {}
    for context in contexts:
        weights = random.exponential(size=IDS) ** 2
        if zeros and random.random() < 0.5:
            weights[random.integers(IDS)] = 0.0
        found[context] = weights / weights.sum()
    return found


def always_all(context):
    return False


def short_after_some(context):
    """A placeholder behind a first 1, and behind a first 0 and then 2."""
    return context in ((1,), (0, 2))


def num_drafts_of(sequence, stops):
    return next((n for n in range(DRAFTS) if stops(sequence[:n])), DRAFTS)


def judged(p, q, stops, judge=int):
    """Each sequence of drafts with its `p` and `q`, and what `judge_block` says of it."""
    lengths = [num_drafts_of(s, stops) for s in SEQUENCES]
    target, draft = (
        np.array([[table[s[:n]] for n in range(DRAFTS)] for s in SEQUENCES], np.float32)
        for table in (p, q)
    )
    at = np.array(SEQUENCES)[:, :, None]
    of = [np.take_along_axis(table, at, axis=2)[:, :, 0] for table in (target, draft)]
    block = judge_block(*of, target, draft, jnp.asarray(list(map(judge, lengths)), jnp.int32))
    for sequence, length, ps, qs, scales, passes in zip(
        SEQUENCES, lengths, *of, *map(np.asarray, block), strict=True
    ):
        if any(sequence[length:]):
            continue  # ids behind the last draft are none: one sequence stands for all
        yield sequence[:length], ps[:length], qs[:length], scales, passes[:length]


def outcomes_of_block(p, q, stops, judge=int):
    """(drafts that stand, distribution of the token after them, chance), each once."""
    for drafts, _, qs, scales, passes in judged(p, q, stops, judge):
        left = float(np.prod(qs, dtype=np.float64))
        for stands in range(len(drafts), -1, -1):
            passed = float(passes[stands - 1]) if stands else 1.0
            chance, left = left * passed, left * (1.0 - passed)
            context = drafts[:stands]
            after = p[context]
            if stands < len(drafts):
                after = np.asarray(rejection.excess_of(after, q[context], scales[stands]))
                after = after / after.sum() if after.sum() > 0 else p[context]
            if chance > 0:
                yield context, after, chance


def outcomes_of_standard(p, q, stops):
    for drafts, ps, qs, *_ in judged(p, q, stops):
        left = float(np.prod(qs, dtype=np.float64))
        for stands in range(len(drafts) + 1):
            context = drafts[:stands]
            if stands == len(drafts):
                yield context, p[context], left
                break
            stays = min(1.0, ps[stands] / qs[stands]) if qs[stands] > 0 else 0.0
            after = np.maximum(p[context] - q[context], 0)
            if left * (1.0 - stays) > 0 and after.sum() > 0:
                yield context, after / after.sum(), left * (1.0 - stays)
            left *= stays


def joint(p, outcomes):
    """The distribution of the first `DRAFTS + 1` tokens; the target draws what a step left out."""
    found = dict.fromkeys(itertools.product(range(IDS), repeat=DRAFTS + 1), 0.0)
    for context, after, chance in outcomes:
        for rest in itertools.product(range(IDS), repeat=DRAFTS + 1 - len(context)):
            whole, likely = context + rest, chance * after[rest[0]]
            for place in range(len(context) + 1, DRAFTS + 1):
                likely = likely * p[whole[:place]][whole[place]]
            found[whole] += likely
    return np.array(list(found.values()))


def target_joint(p):
    return np.array(
        [
            np.prod([p[s[:n]][s[n]] for n in range(DRAFTS + 1)])
            for s in itertools.product(range(IDS), repeat=DRAFTS + 1)
        ]
    )


def expected_accepted(outcomes):
    return sum(len(context) * chance for context, _, chance in outcomes)


STOPS = pytest.mark.parametrize("stops", [always_all, short_after_some])
ZEROS = pytest.mark.parametrize("zeros", [False, True], ids=["", "some ids are impossible"])


@STOPS
@ZEROS
@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_is_as_likely_as_the_target_makes_it(seed, zeros, stops):
    p, q = tables(seed, zeros=zeros), tables(100 + seed, zeros=zeros)
    for outcomes in (outcomes_of_standard, outcomes_of_block):
        np.testing.assert_allclose(joint(p, outcomes(p, q, stops)), target_joint(p), atol=2e-6)


@STOPS
@ZEROS
@pytest.mark.parametrize("seed", range(6))
def test_no_fewer_drafts_stand_than_one_by_one(seed, zeros, stops):
    p, q = tables(seed, zeros=zeros), tables(100 + seed, zeros=zeros)
    block, standard = (
        expected_accepted(outcomes(p, q, stops))
        for outcomes in (outcomes_of_block, outcomes_of_standard)
    )
    assert block >= standard - 1e-6


def test_more_stand_where_a_likely_draft_makes_up_for_an_unlikely_one():
    p, q = tables(3), tables(103)
    block, standard = (
        expected_accepted(outcomes(p, q, always_all))
        for outcomes in (outcomes_of_block, outcomes_of_standard)
    )
    assert block > 1.02 * standard


@STOPS
def test_where_both_models_agree_all_drafts_stand(stops):
    p = tables(0)
    outcomes = list(outcomes_of_block(p, p, stops))
    assert min(stops(c) or len(c) == DRAFTS for c, _, chance in outcomes if chance > 1e-6)
    np.testing.assert_allclose(joint(p, outcomes), target_joint(p), atol=2e-6)


def test_the_enumeration_sees_an_excess_without_its_factor(monkeypatch):
    monkeypatch.setattr(rejection, "excess_of", lambda p, q, scale: excess_of(p, q, 1.0))
    p, q = tables(0), tables(100)
    difference = joint(p, outcomes_of_block(p, q, always_all)) - target_joint(p)
    assert np.abs(difference).max() > 1e-3


def test_the_enumeration_sees_a_block_that_does_not_end_with_the_rows_own_drafts():
    wrong = 0.0
    for seed in range(4):
        p, q = tables(seed), tables(100 + seed)
        outcomes = outcomes_of_block(p, q, short_after_some, judge=lambda length: DRAFTS)
        wrong = max(wrong, np.abs(joint(p, outcomes) - target_joint(p)).max())
    assert wrong > 1e-3


@pytest.mark.soak
def test_the_last_draft_whose_test_passes_decides(make_inputs, monkeypatch):
    """The chances of the rows of `verify_block` are those enumerated: each test against its u."""
    p, q = tables(1), tables(101)
    want = list(judged(p, q, short_after_some))
    rows = len(want)
    drafts = np.full((rows, DRAFTS), -1, np.int32)
    logits = np.zeros((rows, DRAFTS + 1, IDS), np.float32)
    draft_logits = np.full((rows, DRAFTS, IDS), np.nan, np.float32)
    for row, (sequence, *_) in enumerate(want):
        drafts[row, : len(sequence)] = sequence
        for n in range(len(sequence) + 1):
            logits[row, n] = np.log(p[sequence[:n]])
        for n in range(len(sequence)):
            draft_logits[row, n] = np.log(q[sequence[:n]])
    positions = np.broadcast_to(np.arange(5, 6 + DRAFTS, dtype=np.int32), (rows, DRAFTS + 1))
    for seed in range(8):
        u = np.random.default_rng(seed).random((rows, DRAFTS)).astype(np.float32)
        monkeypatch.setattr(rejection, "uniform_noise", lambda *_, u=u: jnp.asarray(u).reshape(-1))
        result = verify_block(
            jnp.asarray(logits),
            drafts,
            jnp.asarray(draft_logits),
            make_inputs(rows),
            positions,
            features=SAMPLED,
        )
        for row, (_, *_, passes) in enumerate(want):
            passed = np.flatnonzero(u[row, : len(passes)] < passes - 1e-6)
            assert result.num_accepted[row] == (passed[-1] + 1 if passed.size else 0)
            assert (np.asarray(result.tokens)[row] >= 0).sum() == result.num_accepted[row] + 1

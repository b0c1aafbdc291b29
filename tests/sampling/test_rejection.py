"""Both ways to verify drawn drafts keep the target's distribution, by many draws and exactly."""

import jax
import numpy as np
import pytest
from verification import (
    GREEDY_CASES,
    LARGE,
    MANY,
    ROWS,
    VOCAB,
    draft_places,
    draw_places,
    int32,
    places,
    softmax,
    spread,
)

from jaxspec.requests.sampling_features import FULL, SAMPLED
from jaxspec.sampling import NO_TOKEN
from jaxspec.sampling.rejection import verify_block, verify_rejection
from jaxspec.sampling.verify import verify_exact

exact = jax.jit(verify_exact)
STANDARD, BLOCK = (
    jax.jit(verify, static_argnames="features") for verify in (verify_rejection, verify_block)
)


@pytest.fixture(params=[STANDARD, BLOCK], ids=["standard", "block"])
def rejection(request):
    return request.param


@pytest.mark.parametrize("features", [SAMPLED, FULL], ids=str)
def test_rejection_verifies_greedy_rows_exactly(rejection, features, make_inputs):
    cases = [case for case in GREEDY_CASES if len(case[0][0]) == 3 and min(case[1][0]) >= 0]
    drafts, target, emitted = (int32(np.concatenate(part)) for part in zip(*cases, strict=True))
    drafts, target, emitted = (np.resize(x, (ROWS, x.shape[1])) for x in (drafts, target, emitted))
    logits = np.where(np.arange(LARGE) == target[:, :, None], 100, -100).astype(np.float32)
    draft_logits = np.random.default_rng(0).normal(size=(ROWS, 3, LARGE)).astype(np.float32)
    inputs = make_inputs(ROWS, temperature=0.0)
    result = rejection(logits, drafts, draft_logits, inputs, places(ROWS, 4), features=features)
    np.testing.assert_array_equal(result.tokens, emitted)


@pytest.mark.few(4)
@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("proposal", ["other", "opposite", "same", "some ids"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_output_keeps_the_targets_distribution(
    rejection, num_drafts, proposal, temperature, make_inputs, assert_distributed_as
):
    random = np.random.default_rng(num_drafts)
    row, other = random.uniform(-1, 1, (2, num_drafts + 1, VOCAB)).astype(np.float32)
    some = np.where(np.arange(VOCAB) % 3 == 1, other[:-1], -np.inf)  # a draft vocabulary of 1, 4
    draft_row = {"other": other[:-1], "opposite": -row[:-1], "same": row[:-1], "some ids": some}
    draft_row = draft_row[proposal].astype(np.float32)
    logits, draft_logits = spread(row, MANY), spread(draft_row, MANY)
    inputs, positions = make_inputs(MANY, temperature), places(MANY, num_drafts + 1)
    # Really drawn, with the drafting noise of the same seeds and positions as the test's.
    drafts = draft_places(draft_logits, inputs, positions[:, :-1])
    result = rejection(logits, drafts, draft_logits, inputs, positions, features=SAMPLED)
    tokens, num_emitted = np.asarray(result.tokens), np.asarray(result.num_emitted)
    np.testing.assert_array_equal(num_emitted, result.num_accepted + 1)
    if proposal == "same":
        assert (num_emitted == num_drafts + 1).all()
    p, q = softmax(row / temperature), softmax(draft_row / temperature)
    for place in range(num_drafts + 1):
        reached = tokens[num_emitted > place, place]
        if reached.size < 1000:
            continue
        assert_distributed_as(reached, p[place])
        if place < num_drafts and rejection is STANDARD:
            rate = (num_emitted[num_emitted > place] > place + 1).mean()
            expected = np.minimum(p[place], q[place]).sum()
            assert abs(rate - expected) < 5 * 0.5 / np.sqrt(reached.size)


@pytest.mark.parametrize("not_drafted", [[], [0, 1, 5]])
def test_rejection_with_top_k_and_top_p_keeps_the_targets_distribution(
    rejection, not_drafted, make_inputs, assert_distributed_as
):
    row = np.log([[0.4, 0.1, 0.3, 0.1, 0.05, 0.05], [0.1, 0.2, 0.3, 0.2, 0.15, 0.05]]).astype("f")
    kept = [[0.4, 0, 0.3, 0, 0, 0], [0, 0.2, 0.3, 0, 0, 0]]  # top-k 3, then .75 of what it left
    draft_row = np.zeros((1, VOCAB), np.float32)
    draft_row[:, not_drafted] = -np.inf
    inputs, positions = make_inputs(MANY, top_k=3, top_p=0.7), places(MANY, 2)
    draft_logits = spread(draft_row, MANY)
    drafts = draft_places(draft_logits, inputs, positions[:, :-1])
    result = rejection(spread(row, MANY), drafts, draft_logits, inputs, positions, features=FULL)
    tokens = np.asarray(result.tokens)
    assert_distributed_as(tokens[:, 0], kept[0])
    assert_distributed_as(tokens[tokens[:, 1] >= 0, 1], kept[1])


def many_steps(method, make_inputs, draft_number=int):
    """Sequences of Markov chains, step by step, and the distribution that they should have."""
    # Markov chains p and q over three ids. A position is drafted again after a rejection before
    # it, with the very same noise: that must not show in the sequences that come out.
    vocab, length, num_drafts, rows = 3, 3, 2, 30_000
    random = np.random.default_rng(8)
    p_chain, q_chain = random.normal(size=(2, vocab, vocab)).astype(np.float32)
    inputs, row = make_inputs(rows), np.arange(rows)
    tokens = np.zeros((rows, 1 + length + num_drafts + 1), np.int32)  # from id 0
    known = np.ones(rows, np.int32)
    while (known <= length).any():
        start = np.minimum(known, length + 1)  # finished rows go on, unread
        positions = int32(start[:, None] + np.arange(num_drafts + 1))
        context = [tokens[row, start - 1]]
        for place in range(num_drafts):
            now = q_chain[context[-1]][:, None], inputs, positions[:, place, None]
            context.append(np.asarray(draft_places(*now, draft_number(place)))[:, 0])
        logits, draft_logits = (chain[np.stack(context, 1)] for chain in (p_chain, q_chain))
        drafts = np.stack(context[1:], 1)
        if method == "exact":
            result = exact(draw_places(logits, inputs, positions), drafts)
        else:
            args = logits, drafts, draft_logits[:, :-1], inputs, positions
            result = (BLOCK if method == "block" else STANDARD)(*args, features=SAMPLED)
        emitted = np.asarray(result.tokens)
        for place in range(num_drafts + 1):
            real = emitted[:, place] != NO_TOKEN
            tokens[row[real], start[real] + place] = emitted[real, place]
        known = start + np.asarray(result.num_emitted)
    p = softmax(p_chain)
    joint = np.einsum("a,ab,bc->abc", p[0], p, p).ravel()
    return tokens[:, 1] * 9 + tokens[:, 2] * 3 + tokens[:, 3], joint


@pytest.mark.parametrize("method", ["exact", "standard", "block"])
def test_many_steps_keep_the_joint_distribution(method, make_inputs, assert_distributed_as):
    assert_distributed_as(*many_steps(method, make_inputs))


def test_the_law_sees_drafts_of_a_block_that_are_drawn_again_with_the_same_noise(
    make_inputs, assert_distributed_as
):
    sequences, joint = many_steps("block", make_inputs, draft_number=lambda place: 0)
    with pytest.raises(AssertionError):
        assert_distributed_as(sequences, joint)


@pytest.mark.parametrize("vocab", [100, 8193])
def test_the_token_after_a_rejection_is_drawn_from_the_excess_alone(rejection, vocab, make_inputs):
    # All of the target's mass is on the last ids, all of the draft's on others.
    row, draft_row = np.full((2, vocab), -np.inf, np.float32), np.zeros((1, vocab), np.float32)
    row[:, -2:], draft_row[:, -2:] = 0, -np.inf
    inputs, positions = make_inputs(8), places(8, 2)
    drafts = np.full((8, 1), 3, np.int32)
    result = rejection(
        spread(row, 8), drafts, spread(draft_row, 8), inputs, positions, features=SAMPLED
    )
    np.testing.assert_array_equal(result.num_accepted, 0)
    assert (np.asarray(result.tokens)[:, 0] >= vocab - 2).all()
    # The draft's mass covers all of the target's: what is left is rounding, if that.
    same = spread(row[:1], 8)
    result = rejection(spread(row, 8), drafts, same, inputs, positions, features=SAMPLED)
    np.testing.assert_array_equal(result.num_emitted, 1)
    assert (np.asarray(result.tokens)[:, 0] >= vocab - 2).all()


def test_a_placeholder_falls_and_the_target_alone_decides(
    rejection, make_inputs, assert_distributed_as
):
    row = np.random.default_rng(3).normal(size=(4, VOCAB)).astype(np.float32)
    logits, inputs, positions = spread(row, MANY), make_inputs(MANY), places(MANY, 4)
    draft_logits = logits[:, :-1]
    drafts = draft_places(draft_logits, inputs, positions[:, :-1])
    drafts = np.where(np.arange(3) == 1, NO_TOKEN, drafts)
    result = rejection(logits, drafts, draft_logits, inputs, positions, features=SAMPLED)
    np.testing.assert_array_equal(result.num_emitted, 2)  # equal distributions: the first stands
    np.testing.assert_array_equal(result.tokens[:, 0], drafts[:, 0])
    assert_distributed_as(result.tokens[:, 1], softmax(row[1]))


@pytest.mark.parametrize("features", [SAMPLED, FULL], ids=str)
def test_placeholders_alone_leave_plain_sampling(rejection, features, make_inputs):
    logits = np.random.default_rng(4).normal(size=(ROWS, 4, LARGE)).astype(np.float32)
    inputs, positions = make_inputs(ROWS, 0.9, top_k=[0, 5] * 8, top_p=0.9), places(ROWS, 4)
    plain = draw_places(logits[:, :1], inputs, positions[:, :1], features)
    none = np.full((ROWS, 3), NO_TOKEN, np.int32)
    result = rejection(logits, none, logits[:, 1:], inputs, positions, features=features)
    np.testing.assert_array_equal(result.tokens[:, :1], plain)
    np.testing.assert_array_equal(result.num_emitted, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("features", [SAMPLED, FULL], ids=str)
def test_a_nan_in_the_target_ends_the_row_and_in_the_draft_only_the_draft(
    rejection, temperature, features, make_inputs
):
    row = np.random.default_rng(5).normal(size=(4, LARGE)).astype(np.float32)
    logits, draft_logits = spread(row, ROWS).copy(), spread(row[:-1], ROWS).copy()
    drafts = np.array(spread(row[:-1].argmax(axis=1), ROWS), np.int32)
    logits[0], logits[1, 1], logits[2, 2, 7] = np.nan, np.nan, np.nan
    drafts[2, 2] = 7  # argmax finds a NaN, and this is where
    logits[3, 0] = -np.inf
    draft_logits[4:8] = np.nan
    inputs, positions = make_inputs(ROWS, temperature), places(ROWS, 4)
    result = rejection(logits, drafts, draft_logits, inputs, positions, features=features)
    tokens, num_emitted = np.asarray(result.tokens), np.asarray(result.num_emitted)
    assert (num_emitted[:4] <= [0, 1, 2, 0]).all() and (num_emitted[4:] >= 1).all()
    if temperature == 0:  # the drafts are the target's own choice, and q plays no part
        np.testing.assert_array_equal(num_emitted, [0, 1, 2, 0] + [4] * (ROWS - 4))
    else:
        np.testing.assert_array_equal(result.num_accepted[4:8], 0)
    prefix = np.arange(4) < num_emitted[:, None]
    assert (tokens[~prefix] == NO_TOKEN).all() and (
        (tokens[prefix] >= 0) & (tokens[prefix] < LARGE)
    ).all()


def test_a_rows_acceptance_depends_on_no_other_row(rejection, make_inputs):
    random = np.random.default_rng(6)
    logits, noise = random.normal(size=(2, ROWS, 4, LARGE)).astype(np.float32)
    draft_logits = (logits + noise / 2)[:, :-1]
    inputs, positions = make_inputs(ROWS, random.choice([0.0, 0.7], ROWS)), places(ROWS, 4)
    drafts = np.asarray(draft_places(draft_logits, inputs, positions[:, :-1]))

    def tokens(chosen, features):
        part = jax.tree.map(lambda leaf: leaf[chosen], inputs)
        args = logits[chosen], drafts[chosen], draft_logits[chosen], part, positions[chosen]
        return np.asarray(rejection(*args, features=features).tokens)

    everything = tokens(np.arange(ROWS), SAMPLED)
    assert len(np.unique((everything != -1).sum(axis=1))) > 1
    order = random.permutation(ROWS)
    np.testing.assert_array_equal(tokens(order[:5], SAMPLED), everything[order[:5]])
    np.testing.assert_array_equal(tokens(order, FULL), everything[order])


def test_stop_ids_are_neither_drafted_nor_emitted_before_the_minimum_length(rejection, make_inputs):
    inputs = make_inputs(MANY, stop_ids=np.full((MANY, 1), 2), min_len=7)
    positions = places(MANY, 4)  # 5, 6, 7, 8
    logits = np.zeros((MANY, 4, VOCAB), np.float32)
    drafts = draft_places(logits[:, 1:], inputs, positions[:, :-1])
    result = rejection(logits, drafts, logits[:, 1:], inputs, positions, features=SAMPLED)
    for tokens in (np.asarray(drafts), np.asarray(result.tokens)):
        assert not (tokens[:, :2] == 2).any()
        assert (tokens[:, 2] == 2).any()
    np.testing.assert_array_equal(result.num_emitted, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_vocabulary_of_stop_ids_alone_drafts_nothing_before_the_minimum_length(
    rejection, temperature, make_inputs
):
    random = np.random.default_rng(9)
    stops = np.full((ROWS, 1), 2)
    inputs, positions = make_inputs(ROWS, temperature, stop_ids=stops, min_len=6), places(ROWS, 4)
    logits = random.normal(size=(ROWS, 4, LARGE)).astype(np.float32)
    logits[:, :, 2] = 100.0
    draft_logits = np.where(np.arange(LARGE) == 2, logits[:, :-1], -np.inf).astype(np.float32)
    drafts = np.asarray(draft_places(draft_logits, inputs, positions[:, :-1]))
    np.testing.assert_array_equal(drafts, spread([NO_TOKEN, 2, 2], ROWS))
    result = rejection(logits, drafts, draft_logits, inputs, positions, features=SAMPLED)
    plain = draw_places(logits[:, :1], inputs, positions[:, :1])
    np.testing.assert_array_equal(result.num_emitted, 1)
    np.testing.assert_array_equal(result.tokens[:, :1], plain)

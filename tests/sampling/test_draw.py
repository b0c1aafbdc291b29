import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.requests.sampling_features import FULL, SAMPLED
from jaxspec.sampling import NO_TOKEN, Use, draw, draw_draft

VOCAB = 8
MANY = 20_000
run = jax.jit(draw, static_argnames=("features", "use"))
run_draft = jax.jit(draw_draft)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def positions_of(rows, start=0):
    return jnp.arange(start, start + rows, dtype=jnp.int32)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_follow_the_softmax_of_the_logits(temperature, make_inputs, assert_distributed_as):
    row = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    row[2] = -np.inf
    logits = np.broadcast_to(row, (MANY, VOCAB))
    # One seed over many positions, and many seeds at one position: both are independent draws.
    one_seed = make_inputs(MANY, temperature, seeds=np.full(MANY, 7))
    for inputs, positions in [
        (one_seed, positions_of(MANY)),
        (make_inputs(MANY, temperature), jnp.zeros(MANY, jnp.int32)),
    ]:
        tokens = run(logits, inputs, positions, features=SAMPLED)
        assert_distributed_as(tokens, softmax(row / temperature))


def test_top_k_and_top_p_draw_from_what_they_keep(make_inputs, assert_distributed_as):
    row = np.log([0.05, 0.4, 0.1, 0.3, 0.05, 0.04, 0.03, 0.03]).astype(np.float32)
    inputs = make_inputs(MANY, top_k=3, top_p=0.8)  # after top-k .5, .375, .125
    tokens = run(np.broadcast_to(row, (MANY, VOCAB)), inputs, positions_of(MANY), features=FULL)
    assert_distributed_as(tokens, [0, 0.4, 0, 0.3, 0, 0, 0, 0])


@pytest.mark.parametrize("features", [SAMPLED, FULL], ids=str)
def test_greedy_rows_take_the_likeliest_allowed_token(features, make_inputs):
    logits = np.random.default_rng(1).normal(size=(64, VOCAB)).astype(np.float32)
    logits[0] = [0, 3, 1, 3, 3, 2, 1, 0]  # the lowest of equals
    inputs = make_inputs(
        64, temperature=0.0, top_k=2, top_p=0.1, stop_ids=np.full((64, 1), 1), min_len=32
    )
    allowed = logits.copy()
    allowed[:32, 1] = -np.inf
    tokens = run(logits, inputs, positions_of(64), features=features)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, allowed.argmax(axis=1))


def test_a_row_draws_the_same_in_any_program_that_serves_it(make_inputs):
    rows, vocab = 48, 997
    random = np.random.default_rng(2)
    logits = random.normal(size=(rows, vocab)).astype(np.float32) * 3
    temperature = random.choice([0.0, 0.7, 1.3], rows)
    inputs = make_inputs(rows, temperature, stop_ids=np.full((rows, 1), 4), min_len=20)
    tokens = [run(logits, inputs, positions_of(rows), features=v) for v in (SAMPLED, FULL)]
    np.testing.assert_array_equal(*tokens)


def test_a_draw_depends_on_neither_its_row_nor_its_batch(make_inputs):
    rows, vocab = 12, 997
    random = np.random.default_rng(3)
    logits = random.normal(size=(rows, vocab)).astype(np.float32)
    inputs, positions = make_inputs(rows, 0.9, top_k=40, top_p=0.95), positions_of(rows, 100)
    tokens = np.asarray(run(logits, inputs, positions, features=FULL))
    order = random.permutation(rows)
    for chosen in (order, order[:5]):
        part = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], inputs)
        got = run(logits[chosen], part, positions[chosen], features=FULL)
        np.testing.assert_array_equal(got, tokens[chosen])


@pytest.mark.parametrize("features", [SAMPLED, FULL], ids=str)
def test_a_row_without_a_choice_gives_no_token(features, make_inputs):
    inf, nan = np.inf, np.nan
    logits = np.zeros((8, VOCAB), np.float32)
    logits[0] = nan
    logits[1, 5] = nan
    logits[2] = -inf
    logits[3] = inf
    logits[4, :7] = -inf
    logits[5, 6] = inf  # forced
    logits[6, 1:] = -inf  # and the stop mask takes the last one
    logits[7, 0] = nan  # under a mask a NaN is none
    inputs = make_inputs(
        8, [0, 1, 0, 1, 0, 1, 0, 1], top_k=3, top_p=0.9, stop_ids=np.zeros((8, 1)), min_len=1
    )
    tokens = np.asarray(run(logits, inputs, jnp.zeros(8, jnp.int32), features=features))
    np.testing.assert_array_equal(tokens[:7], [NO_TOKEN] * 4 + [7, 6, NO_TOKEN])
    assert 1 <= tokens[7] < VOCAB


def test_a_draft_has_the_distribution_it_will_be_judged_by(make_inputs, assert_distributed_as):
    row = np.random.default_rng(4).normal(size=VOCAB).astype(np.float32)
    inputs = make_inputs(MANY, 0.6, top_k=2, stop_ids=np.full((MANY, 1), 3), min_len=MANY)
    logits = np.broadcast_to(row, (MANY, VOCAB))
    tokens = run_draft(logits, inputs, positions_of(MANY))
    row[3] = -np.inf
    assert_distributed_as(tokens, softmax(row / 0.6))


def test_a_draft_is_drawn_with_noise_of_its_own(make_inputs):
    logits = np.random.default_rng(9).normal(size=(48, 997)).astype(np.float32)
    inputs, positions = make_inputs(48, 0.8), positions_of(48)
    drafts = np.asarray(run_draft(logits, inputs, positions))
    own = run(logits, inputs, positions, features=SAMPLED, use=Use.DRAFT)
    np.testing.assert_array_equal(drafts, own)
    assert (drafts != run(logits, inputs, positions, features=SAMPLED)).any()


def test_a_draw_of_no_rows_is_empty(make_inputs):
    logits = jnp.zeros((0, 5000), jnp.float32)
    for features in (SAMPLED, FULL):
        tokens = run(logits, make_inputs(0), positions_of(0), features=features)
        assert tokens.shape == (0,) and tokens.dtype == jnp.int32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verification import GREEDY_CASES, MANY, VOCAB, draw_places, int32, places, softmax, spread

from jaxspec.sampling import NO_TOKEN
from jaxspec.sampling.verify import verify_exact, verify_synthetic

exact = jax.jit(verify_exact)
synthetic = jax.jit(verify_synthetic)


@pytest.mark.parametrize(("drafts", "target", "emitted"), GREEDY_CASES)
def test_exact_verification_gives_the_table(drafts, target, emitted):
    result = verify_exact(jnp.asarray(target, jnp.int32), jnp.asarray(drafts, jnp.int32))
    np.testing.assert_array_equal(result.tokens, emitted)
    num_emitted = (np.asarray(emitted) != -1).sum(axis=1)
    np.testing.assert_array_equal(result.num_emitted, num_emitted)
    failed = np.asarray(target)[np.arange(len(target)), result.num_accepted] == -1
    np.testing.assert_array_equal(result.num_accepted, num_emitted - ~failed)
    assert result.tokens.dtype == result.num_accepted.dtype == result.num_emitted.dtype == jnp.int32


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_exact_output_is_plain_samplings_own_token_for_token(
    num_drafts, make_inputs, assert_distributed_as
):
    random = np.random.default_rng(num_drafts)
    row = random.uniform(-1, 1, (num_drafts + 1, VOCAB)).astype(np.float32)
    inputs, positions = make_inputs(MANY, 0.8), places(MANY, num_drafts + 1)
    plain = draw_places(spread(row, MANY), inputs, positions)
    drafts = int32(spread(row[:-1].argmax(axis=1), MANY))
    result = exact(plain, drafts)
    tokens, num_emitted = np.asarray(result.tokens), np.asarray(result.num_emitted)
    reached = np.arange(num_drafts + 1) < num_emitted[:, None]
    np.testing.assert_array_equal(tokens, np.where(reached, plain, NO_TOKEN))
    for place, p in enumerate(softmax(row / 0.8)):
        assert_distributed_as(tokens[reached[:, place], place], p)
    # A draft stands with exactly its probability under the target.
    assert abs((num_emitted > 1).mean() - softmax(row[0] / 0.8).max()) < 5 * 0.5 / np.sqrt(MANY)


def test_synthetic_drafts_are_emitted_as_they_are():
    drafts, positions = int32([[1, 2], [3, -1]]), places(2, 3)
    target, seeds = int32([[10, 20, 50], [30, 40, 40]]), int32([0, 1])
    for rate, emitted in (1, [[1, 2, 50], [3, 40, -1]]), (0, [[10, -1, -1], [30, -1, -1]]):
        result = synthetic(target, drafts, np.full(2, rate, np.float32), seeds, positions)
        np.testing.assert_array_equal(result.tokens, emitted)


@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.2], [1, 1, 1], [0, 0, 0], [0.7, 0.7, 0.0]])
def test_synthetic_drafts_stand_at_the_given_rates(rates):
    drafts, target = np.zeros((MANY, 3), np.int32), np.ones((MANY, 4), np.int32)
    seeds = np.arange(MANY, dtype=np.int32)
    result = synthetic(target, drafts, jnp.asarray(rates, jnp.float32), seeds, places(MANY, 4))
    got = [(np.asarray(result.num_accepted) > place).mean() for place in range(3)]
    np.testing.assert_allclose(got, rates, atol=0.01)

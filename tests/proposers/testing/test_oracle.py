"""The oracle proposer drafts what it knows, wrong as often as it is told to be."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.proposers import DraftInputs
from jaxspec.proposers.testing.oracle import OracleProposer
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.sampling import SamplingInputs

SEQUENCE = tuple(range(10, 60))


def oracle(accuracy=None, vary=False, sequences=(SEQUENCE,), seed=0):
    return OracleProposer(
        num_drafts=3,
        vocab_size=100,
        vary_num_drafts=vary,
        sequences=sequences,
        accuracy=accuracy,
        seed=seed,
    )


def propose(proposer, num_computed, key=1):
    rows = len(num_computed)
    ints = jnp.zeros(rows, jnp.int32)
    inputs = DraftInputs(
        model=None, hidden=None, aux_hidden=None, next_tokens=ints, last_index=ints, slots=ints + 1,
        num_computed=jnp.asarray(num_computed, jnp.int32), max_len=ints + 99, last_token=ints,
        should_draft=ints == 0, proposer_key=ints + key, sampling=SamplingInputs({}), page_size=4,
        features=GREEDY, num_drafts=proposer.num_drafts, num_emitted=ints, state_offset=ints,
        ring_length=ints, paths=None,
    )  # fmt: skip
    drafts, cache = proposer.propose(None, inputs, "cache", proposer.init_tables(None))
    assert cache == "cache" and drafts.logits is None
    return np.asarray(drafts.tokens), np.asarray(drafts.num_drafts)


def test_right_drafts_are_the_tokens_after_the_newest():
    tokens, num_drafts = propose(oracle(), [0, 5, 47, 48, 49])
    want = [[11, 12, 13], [16, 17, 18], [58, 59, -1], [59, -1, -1], [-1, -1, -1]]
    assert tokens.tolist() == want and num_drafts.tolist() == [3] * 5


@pytest.mark.soak
def test_drafts_are_wrong_at_the_given_rates():
    positions = list(range(46)) * 40
    right = 0
    for seed in range(4):
        tokens, _ = propose(oracle((0.9, 0.5, 0.0), seed=seed), list(range(46)))
        right = right + (tokens == np.arange(46)[:, None] + [[11, 12, 13]]).mean(0)
    assert np.all(np.abs(right / 4 - [0.9, 0.5, 0.0]) < [0.1, 0.12, 1e-9])
    again, _ = propose(oracle((0.9, 0.5, 0.0)), positions)
    assert (again.reshape(40, 46, 3) == again[:46]).all()  # by position, not by row or step


def test_varied_rows_draft_0_to_k_tokens_and_leave_holes():
    tokens, num_drafts = propose(oracle(vary=True), list(range(46)))
    assert set(num_drafts.tolist()) == {0, 1, 2, 3} and (tokens[:, 1] == -1).any()


def test_a_request_finds_the_sequence_its_prompt_begins():
    sequences = ((1, 2, 3), (1, 2, 4), (7, 8, 9))
    proposer = oracle(sequences=sequences)
    assert [proposer.request_key((1, 2), seed) for seed in (0, 1, 2)] == [1, 2, 1]
    assert proposer.request_key((7,), 5) == 3 and proposer.request_key((5,), 0) == 0
    tokens, _ = propose(proposer, [0], key=0)
    assert tokens.tolist() == [[-1, -1, -1]]


def test_an_oracle_without_continuations_or_rates_is_refused():
    with pytest.raises(ValueError, match="continuations"):
        oracle(sequences=())
    with pytest.raises(ValueError, match="one rate for each of the 3 drafts"):
        oracle((0.5, 0.6))

"""What a step reports: every place beside its token, and prompts in pieces, across chunks."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.row_tiles import deterministic
from jaxspec.plan.row import SAMPLING_FIELDS
from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.sampling_features import (
    FULL,
    GREEDY,
    LOGPROBS,
    PROMPT_LOGPROBS,
    SamplingFeatures,
)
from jaxspec.runner import logprobs
from jaxspec.runner.logprobs import prompt_logprobs
from jaxspec.runner.prepare import Places
from jaxspec.runner.verify import Scored, emitted_logprobs
from jaxspec.sampling import Acceptance, SamplingInputs

VOCAB, ROWS, WIDTH = 40, 2, 3
BOTH = SamplingFeatures.of(LOGPROBS, PROMPT_LOGPROBS)
RANDOM = np.random.default_rng(0)


class HeadModel:
    """Scores are a product with the hidden states."""

    head = RANDOM.normal(size=(8, VOCAB)).astype(np.float32)

    def logits(self, hidden):
        return hidden @ self.head


def make_inputs(chunk_lens=(), following=()):
    """A rectangle of 2 rows and these chunks, whose tokens are numbered from 10 on."""
    num_chunk = sum(chunk_lens)
    prefill = SimpleNamespace(query_start=np.cumsum([0, *chunk_lens], dtype=np.int32))
    model = SimpleNamespace(
        tokens=np.concatenate([np.zeros(ROWS * WIDTH), 10 + np.arange(num_chunk)]).astype(np.int32),
        prefill=prefill if chunk_lens else None,
    )
    return SimpleNamespace(
        places=Places(ROWS, WIDTH), model=model, next_prefill_token=np.array(following, np.int32)
    )


def accepted(tokens):
    return Acceptance(jnp.asarray(tokens, jnp.int32), jnp.zeros(len(tokens), jnp.int32))


def unpack(packed):
    return LAYOUT.unpack(np.asarray(packed))


def emitted(logits, tokens, num_reported):
    """Fields by place, of rows that report so many ids."""
    places = Places(ROWS, WIDTH)
    columns = {each.name: jnp.zeros((3, *each.shape), each.dtype) for each in SAMPLING_FIELDS}
    rows, ends = places.split_rows(columns | {"num_reported": jnp.asarray(num_reported)})
    scored = (
        Scored(SamplingInputs(rows).repeat(WIDTH), jnp.zeros(ROWS * WIDTH, jnp.int32)),
        Scored(SamplingInputs(ends), jnp.zeros(1, jnp.int32)),
    )
    return unpack(emitted_logprobs(jnp.asarray(logits), accepted(tokens), places, scored, BOTH))


@pytest.mark.parametrize("num_reported", [(1, 1, 1), (21, 0, 0), (0, 1, 3), (0, 0, 1)])
def test_the_logits_of_a_place_are_reported_with_the_token_behind_it(num_reported):
    tokens = [[5, 6, -1], [7, 8, 9], [4, -1, -1]]
    logits = RANDOM.normal(size=(ROWS * WIDTH + 1, VOCAB)).astype(np.float32)
    fields = emitted(logits, tokens, num_reported)
    assert fields["logit"].shape == (3, WIDTH)
    scored = {(row, place): row * WIDTH + place for row in range(2) for place in range(3)}
    for (row, place), index in {**scored, (2, 0): ROWS * WIDTH}.items():
        token, own = tokens[row][place], logits[index]
        if token >= 0:
            assert fields["logit"][row, place] == own[token]
            assert fields["rank"][row, place] == 1 + (own > own[token]).sum()
            total = np.exp(own - own.max()).sum()
            np.testing.assert_allclose(fields["log_total"][row, place], np.log(total), rtol=1e-5)
            if num_reported[row] > 1:
                order = np.argsort(-own, kind="stable")[:20]
                np.testing.assert_array_equal(fields["top_ids"][row, place], order)


def test_in_a_deterministic_engine_a_token_alone_has_the_bits_that_it_has_among_others():
    tokens = [[5, 6, -1], [7, 8, 9], [4, -1, -1]]
    logits = RANDOM.normal(size=(ROWS * WIDTH + 1, VOCAB)).astype(np.float32)
    with deterministic():
        alone, listed = emitted(logits, tokens, (1, 1, 1)), emitted(logits, tokens, (1, 1, 2))
    for name in ("logit", "rank", "log_total"):
        np.testing.assert_array_equal(alone[name], listed[name])
    np.testing.assert_array_equal(alone["top_logits"][..., 0], listed["top_logits"][..., 0])


def test_rows_without_logprobs_get_none():
    logits = jnp.full((ROWS * WIDTH + 1, VOCAB), jnp.nan)
    assert not emitted(logits, [[5, 6, -1]] * 3, (0, 0, 0))["logit"].any()


@pytest.mark.parametrize("block", [256, 4, 7, 1])
def test_prompt_tokens_are_scored_in_pieces_and_across_borders(monkeypatch, block):
    """Chunks 10 11 12 | 13 14 | 15 16: 20 follows the first, the step's own 4 the second."""
    monkeypatch.setattr(logprobs, "_PIECE", block)
    following = [11, 12, 20, 14, 4, 16, 30]
    inputs = make_inputs((3, 2, 2), (20, -1, 30))
    hidden = RANDOM.normal(size=(ROWS * WIDTH + 7, 8)).astype(np.float32)
    tokens = [[0] * 3, [0] * 3, [1, -1, -1], [4, -1, -1], [2, -1, -1]]
    packed = prompt_logprobs(HeadModel(), jnp.asarray(hidden), inputs, accepted(tokens), BOTH)
    fields, logits = unpack(packed), hidden[ROWS * WIDTH :] @ HeadModel.head
    np.testing.assert_allclose(fields["logit"], logits[np.arange(7), following], rtol=1e-5)


@pytest.mark.parametrize("features", [GREEDY, FULL, SamplingFeatures.of(LOGPROBS)])
def test_nothing_is_computed_that_a_program_does_not_report(features):
    inputs = make_inputs((3,), (-1,))
    assert prompt_logprobs(None, None, inputs, None, features) is None
    if LOGPROBS not in features.names:
        assert emitted_logprobs(None, None, None, None, features) is None


def test_a_program_without_a_prompt_reports_none():
    assert prompt_logprobs(None, None, make_inputs(), None, BOTH) is None

"""Which of the target's tokens each row gets, in programs with and without logits."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.requests.sampling_features import FULL, GREEDY, SAMPLED
from jaxspec.runner.prepare import StepInputs
from jaxspec.runner.verify import verify
from jaxspec.sampling import ExactVerifier, RejectionVerifier, SamplingInputs, draw
from jaxspec.weight import Dense

VOCAB, WIDTH, STOP = 32, 3, 9
NUM_DECODE = 3  # rows; the others end their prompt


class ScoresModel:
    """Its hidden states are the scores."""

    def __init__(self, has_logits):
        self.has_logits = has_logits

    def logits(self, hidden):
        assert self.has_logits, "a greedy program makes none"
        return hidden

    def greedy_tokens(self, hidden, forbidden):
        assert not self.has_logits
        return argmax_matmul(hidden, Dense(jnp.eye(VOCAB)), forbidden)


def run(rows, scores, first_position, features, verifier, num_drafts=WIDTH - 1):
    """`verify` of rows of which the first decode, as a step calls it."""
    num_ends = rows.num_rows - NUM_DECODE
    drafts = jnp.broadcast_to(jnp.asarray(num_drafts, jnp.int32), (NUM_DECODE,))
    inputs = StepInputs(
        active=rows,
        index=jnp.arange(rows.num_rows),
        model=SimpleNamespace(width=WIDTH, decode=SimpleNamespace(slots=rows.slot[:NUM_DECODE])),
        logits_indices=jnp.arange(len(scores)),
        drafts=rows.drafts[:NUM_DECODE],
        num_draft_tokens=jnp.pad(drafts, (0, num_ends)),
        produces_token=jnp.ones(rows.num_rows, bool),
        first_position=jnp.asarray(first_position, jnp.int32),
        next_prefill_token=jnp.full(num_ends, -1),
        page_size=4,
    )
    model, draft_logits = ScoresModel(features.makes_logits), jnp.zeros((7, WIDTH - 1, VOCAB))
    result, _ = verify(model, jnp.asarray(scores), inputs, draft_logits, verifier, features)
    assert result.tokens.dtype == result.num_accepted.dtype == jnp.int32
    return np.asarray(result.tokens), np.asarray(result.num_accepted)


def scores_of(tokens, second=5):
    """Scores that are highest for these tokens, then for `second`."""
    ids = np.arange(VOCAB)
    return np.float32(2 * (ids == np.reshape(tokens, (-1, 1))) + (ids == second))


BOTH = pytest.mark.parametrize("verifier", [ExactVerifier(), RejectionVerifier()])
SAMPLERS = pytest.mark.parametrize("features", [GREEDY, SAMPLED, FULL], ids=str)


@pytest.mark.few(2)
@BOTH
@SAMPLERS
@pytest.mark.parametrize("num_ends", [0, 2])
def test_greedy_rows_take_the_targets_best_in_every_program(
    features, verifier, num_ends, make_rows
):
    rows = [
        {"slot": 1, "drafts": [11, 12]},
        {"slot": 2, "drafts": [21, 0]},
        {"slot": 3, "drafts": [31, 32]},
        {"slot": 4},
        {"slot": 5},
    ][: NUM_DECODE + num_ends]
    target = [11, 12, 13, 21, 22, 23, 31, 30, 29, 3, 4][: NUM_DECODE * WIDTH + num_ends]
    rows = make_rows(WIDTH - 1, rows)
    tokens, accepted = run(
        rows, scores_of(target), [9] * rows.num_rows, features, verifier, num_drafts=[2, 2, 0]
    )
    expected = [[11, 12, 13], [21, 22, -1], [31, -1, -1], [3, -1, -1], [4, -1, -1]]
    assert tokens.tolist() == expected[: rows.num_rows]
    assert accepted.tolist() == [2, 1, 0, 0, 0][: rows.num_rows]


@pytest.mark.few(2)
@BOTH
@SAMPLERS
def test_no_stop_id_comes_before_the_minimum_length(features, verifier, make_rows):
    """By each token's own index: within a verify the second may be what the first may not."""
    stop = {"stop_ids": [STOP, 7], "min_len": 20}
    rows = [
        {"slot": 1, "drafts": [5, 5], **stop},
        {"slot": 2, "drafts": [5, STOP], **stop},
        {"slot": 3, "drafts": [STOP, STOP], "stop_ids": [STOP]},
        {"slot": 4, **stop},
        {"slot": 5, **stop},
    ]
    scores = scores_of([STOP] * (NUM_DECODE * WIDTH + 2))
    first_position = [18, 19, 18, 19, 20]
    tokens, _ = run(
        make_rows(WIDTH - 1, rows),
        scores,
        first_position,
        features,
        verifier,
    )
    ends = [[5, -1, -1], [STOP, -1, -1]]
    assert tokens.tolist() == [[5, 5, STOP], [5, STOP, STOP], [STOP] * 3, *ends]


@pytest.mark.few(2)
@BOTH
@SAMPLERS
def test_where_the_target_fails_nothing_is_emitted(features, verifier, make_rows):
    rows = [{"slot": slot, "drafts": [6, 6]} for slot in range(1, 6)]
    scores = scores_of([6] * (NUM_DECODE * WIDTH + 2))
    scores[1, 3], scores[3], scores[9] = np.nan, -np.inf, np.inf
    tokens, _ = run(
        make_rows(WIDTH - 1, rows),
        scores,
        [9] * 5,
        features,
        verifier,
    )
    expected = [[6, -1, -1], [-1] * 3, [6] * 3, [-1] * 3, [6, -1, -1]]
    assert tokens.tolist() == expected


@pytest.mark.few(1)
@SAMPLERS
def test_every_token_is_the_draw_of_its_position(features, make_rows):
    """Drafts that plain sampling would draw there all stand; chunk ends draw as it does, too."""
    random = np.random.default_rng(0)
    places, first_position = NUM_DECODE * WIDTH + 2, np.array([4, 17, 30, 8, 25])
    scores = random.normal(size=(places, VOCAB)).astype(np.float32)
    row_of = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4])
    place = np.array([0, 1, 2] * NUM_DECODE + [0, 0])
    heat = np.zeros(5) if not features.makes_logits else np.array([0.9, 0.0, 1.5, 0.7, 0.0])
    how = SamplingInputs(
        {
            "temperature": jnp.asarray(heat, jnp.float32),
            "top_k": jnp.asarray([4, 0, 9, 5, 5], jnp.int32),
            "top_p": jnp.asarray([0.9, 1.0, 0.8, 0.9, 1.0], jnp.float32),
            "seed": jnp.asarray([7, 8, 9, 10, 11], jnp.int32),
            "stop_ids": jnp.full((5, 1), STOP, jnp.int32),
            "min_len": jnp.asarray([5, 0, 40, 9, 0], jnp.int32),
        }
    )
    flat = jax.tree.map(lambda x: x[row_of], how)
    positions = jnp.asarray(first_position[row_of] + place, jnp.int32)
    drawn = np.asarray(draw(jnp.asarray(scores), flat, positions, features=features))
    rows = [
        {name: np.asarray(column)[row] for name, column in how.columns.items()}
        | {"slot": row + 1, "drafts": drawn[row * WIDTH :][: WIDTH - 1] if row < NUM_DECODE else []}
        for row in range(5)
    ]
    tokens, accepted = run(
        make_rows(WIDTH - 1, rows), scores, first_position, features, ExactVerifier()
    )
    assert tokens[:NUM_DECODE].ravel().tolist() + tokens[NUM_DECODE:, 0].tolist() == drawn.tolist()
    assert (tokens[NUM_DECODE:, 1:] == -1).all() and accepted.tolist() == [2, 2, 2, 0, 0]

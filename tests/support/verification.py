"""Rows of logits and drafts, for the tests of verification."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.requests.sampling_features import SAMPLED
from jaxspec.sampling import draw, draw_draft

VOCAB = 6
MANY = 20_000
ROWS, LARGE = 16, 100  # of the tests that count nothing, so that they share programs


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def spread(row, rows):
    return np.broadcast_to(np.asarray(row), (rows, *np.shape(row)))


def places(rows, emits, start=5):
    return spread(np.arange(start, start + emits, dtype=np.int32), rows)


def at_places(function, logits, inputs, positions, *others):
    """A token for each row and place, with the noise of its position."""
    rows, width, vocab = logits.shape
    flat = logits.reshape(-1, vocab), inputs.repeat(width), positions.reshape(-1)
    return function(*flat, *others).reshape(rows, width)


@jax.jit
def draft_places(logits, inputs, positions, first=0):
    """The drafts of a step, the first of which is its draft number `first`."""
    rows, width, _ = logits.shape
    number = jnp.tile(first + jnp.arange(width), rows)
    return at_places(draw_draft, logits, inputs, positions, number)


@partial(jax.jit, static_argnames="features")
def draw_places(logits, inputs, positions, features=SAMPLED):
    """The target's own."""
    return at_places(partial(draw, features=features), logits, inputs, positions)


int32 = partial(np.asarray, dtype=np.int32)

# Drafts, what the target draws, what comes out: rows of cases from vLLM's rejection sampler.
GREEDY_CASES = [
    ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    ([[1, 2], [3, -1]], [[1, 2, 5], [3, 4, 0]], [[1, 2, 5], [3, 4, -1]]),
    ([[1]], [[1, 2]], [[1, 2]]),
    ([[]], [[5]], [[5]]),
    ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, -1], [4, 8, -1, -1]]),
    ([[1, 2]], [[1, 2, 3]], [[1, 2, 3]]),
    ([[1]], [[2, 3]], [[2, -1]]),
    ([[1, -1, 3]], [[1, 2, 3, 4]], [[1, 2, -1, -1]]),  # nothing stands after a placeholder
    ([[-1, 2]], [[-1, 2, 3]], [[-1, -1, -1]]),  # a placeholder is not the target's failure
    ([[1, 2]], [[1, -1, 3]], [[1, -1, -1]]),  # nothing is emitted after a failure
    ([[1, 2]], [[1, 2, -1]], [[1, 2, -1]]),
]

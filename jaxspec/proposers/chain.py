"""Drafting of one token after another per row, greedy or sampled."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.proposers.base import DraftInputs, Drafts
from jaxspec.sampling import NO_TOKEN, draw_draft


class Chain:
    """Drafts of each row so far: the likeliest tokens, or drawn ones if proposer and program draw.

    A drafter may score a subset of the vocabulary; its scores are then indexed by position in
    `ids`.
    """

    def __init__(
        self,
        inputs: DraftInputs,
        is_probabilistic: bool,
        vocab_size: int,
        ids: Int[Array, " scored"] | None = None,
    ):
        """Begin without drafts. `ids` are the scored ids, ascending; None scores all."""
        self._inputs, self._vocab_size, self._ids = inputs, vocab_size, ids
        # A program that draws no tokens does not read the distribution of the drafts.
        self._draws = is_probabilistic and inputs.features.draws
        self._tokens: list[Int[Array, " rows"]] = []
        self._logits: list[Float[Array, "rows vocab"]] = []

    def add(
        self,
        greedy: Callable[[Int[Array, "rows 0"]], Int[Array, " rows"]],
        scores: Callable[[], Float[Array, "rows scored"]],
    ) -> Int[Array, " rows"]:
        """Return the next draft (int32) of each row; -1 where there is none.

        One of the two functions is called: `greedy` returns the index of the largest score that is
        not among the forbidden ids given to it (none here), and `scores` returns all scores.
        """
        place, rows = len(self._tokens), self._inputs.slots.shape[0]
        if self._draws:
            logits = scores()
            if self._ids is not None:
                logits = over_all_ids(logits, self._ids, self._vocab_size)
            position = self._inputs.num_computed + 1 + place
            token = draw_draft(logits, self._inputs.sampling, position, place)
            self._logits.append(logits)
        else:
            token = greedy(jnp.zeros((rows, 0), jnp.int32))  # the target rejects forbidden drafts
            token = token if self._ids is None else ids_at(token, self._ids)
        self._tokens.append(token)
        return token

    def drafts(self) -> Drafts:
        """Return all drafts, for the rows that draft."""
        if not self._tokens:
            return Drafts.none(self._inputs.slots.shape[0])
        return Drafts(
            tokens=jnp.stack(self._tokens, axis=1),
            num_drafts=jnp.where(self._inputs.should_draft, self._inputs.num_drafts, 0),
            logits=jnp.stack(self._logits, axis=1) if self._draws else None,
        )


def ids_at(indices: Int[Array, " rows"], ids: Int[Array, " scored"]) -> Int[Array, " rows"]:
    """Return the ids (int32) at `indices`; -1 stays -1."""
    return jnp.where(indices < 0, NO_TOKEN, ids[indices])


def over_all_ids(
    scores: Float[Array, "rows scored"], ids: Int[Array, " scored"], vocab_size: int
) -> Float[Array, "rows vocab"]:
    """Scatter `scores` of `ids` (ascending) into the vocabulary; all other ids get -inf.

    Rejection sampling stays exact: it needs the distribution q that a draft was drawn from, and
    softmax gives the other ids q = 0. The target's probability of these ids is in the excess
    `p - q`.
    """
    all_scores = jnp.full((scores.shape[0], vocab_size), -jnp.inf, scores.dtype)
    return all_scores.at[:, ids].set(scores, indices_are_sorted=True, unique_indices=True)

"""Chain: the drafts of each row, one after the other, likeliest or drawn."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.proposers.base import DraftInputs, Drafts
from jaxspec.sampling import NO_TOKEN, draw_draft


class Chain:
    """Takes the likeliest tokens, or draws where the proposer draws and the program may.

    A drafter may score some ids alone, with indices into them in place of ids.
    """

    def __init__(
        self,
        inputs: DraftInputs,
        is_probabilistic: bool,
        vocab_size: int,
        ids: Int[Array, " scored"] | None = None,
    ):
        """Begin without a draft. `ids`: those that are scored, ascending; None: all."""
        self._inputs, self._vocab_size, self._ids = inputs, vocab_size, ids
        # A program that draws no token does not read the distribution of its drafts.
        self._draws = is_probabilistic and inputs.sampler.draws
        self._tokens: list[Int[Array, " rows"]] = []
        self._logits: list[Float[Array, "rows vocab"]] = []

    def add(
        self,
        greedy: Callable[[Int[Array, "rows 0"]], Int[Array, " rows"]],
        scores: Callable[[], Float[Array, "rows scored"]],
    ) -> Int[Array, " rows"]:
        """The next draft (int32) of each row; -1 where there is none.

        One of the two is called: `greedy` gives the index of the largest score, passing over none
        of the forbidden ids that it gets, and `scores` gives them all.
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
        """All of them, for the rows that draft."""
        if not self._tokens:
            return Drafts.none(self._inputs.slots.shape[0])
        return Drafts(
            tokens=jnp.stack(self._tokens, axis=1),
            num_drafts=jnp.where(self._inputs.should_draft, self._inputs.num_drafts, 0),
            logits=jnp.stack(self._logits, axis=1) if self._draws else None,
        )


def ids_at(indices: Int[Array, " rows"], ids: Int[Array, " scored"]) -> Int[Array, " rows"]:
    """The ids (int32) at `indices`; -1 stays, which says that there is none."""
    return jnp.where(indices < 0, NO_TOKEN, ids[indices])


def over_all_ids(
    scores: Float[Array, "rows scored"], ids: Int[Array, " scored"], vocab_size: int
) -> Float[Array, "rows vocab"]:
    """`scores` of `ids` (ascending), and -inf for what is never drafted.

    Rejection sampling stays exact: it needs the distribution q that a draft was drawn from, and
    softmax gives the other ids q = 0. The target's share of those comes from the excess p - q.
    """
    all_scores = jnp.full((scores.shape[0], vocab_size), -jnp.inf, scores.dtype)
    return all_scores.at[:, ids].set(scores, indices_are_sorted=True, unique_indices=True)

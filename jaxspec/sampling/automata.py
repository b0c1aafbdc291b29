"""Automata of regular grammars on the device: masks, and the states after tokens."""

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN
from jaxspec.plan.automaton_plan import (
    NUM_AUTOMATA,
    NUM_MASKS,
    NUM_STATES,
    STATE_BITS,
    automaton_layout,
)
from jaxspec.sampling.bits import is_set


@flax.struct.dataclass
class Automata:
    """A pool of states. State 0 allows every token and stays; rows without an automaton have it.

    Tokens with the same effect in all states of an automaton are one class, so that a state has
    some hundred successors instead of one for each token. The states of rows have a count in their
    upper bits (`jaxspec.plan.automaton_plan.STATE_BITS`).
    """

    masks: Int[Array, "masks words"]  # one bit per token, the lowest first
    state_masks: Int[Array, " states"]  # index of the mask of the tokens that a state allows
    forced: Int[Array, " states"]  # longest token of the text that must follow; -1 if no text must
    next: Int[Array, "states classes"]  # int16; state after a token of a class, -1 if refused
    limited: Int[Array, " states"]  # in place of each state at the limit of the reasoning
    automaton: Int[Array, " states"]  # automaton of each state
    classes: Int[Array, "automata vocab"]  # int16; class of each token

    @staticmethod
    def empty(vocab_size: int) -> "Automata":
        """Create a pool without automata."""
        num_classes = 2 * automaton_layout(vocab_size).shapes["next"][1]
        return Automata(
            masks=jnp.full((NUM_MASKS, -(-vocab_size // 32)), -1, jnp.int32),
            state_masks=jnp.zeros(NUM_STATES, jnp.int32),
            forced=jnp.full(NUM_STATES, NO_TOKEN, jnp.int32),
            next=jnp.zeros((NUM_STATES, num_classes), jnp.int16),
            limited=jnp.arange(NUM_STATES, dtype=jnp.int32),
            automaton=jnp.zeros(NUM_STATES, jnp.int32),
            classes=jnp.zeros((NUM_AUTOMATA, vocab_size), jnp.int16),
        )

    def written(self, packed: Int[Array, " plan"]) -> "Automata":
        """Return the pool with the states of a packed plan (`jaxspec.plan.automaton_plan`)."""
        vocab_size = self.classes.shape[1]
        plan = automaton_layout(vocab_size).unpack(packed)
        index, states = plan["automaton"], plan["states"]
        classes = _halves(plan["classes"])[:vocab_size]
        following = _halves(plan["next"])
        allowed = is_set(plan["allowed"], self.next.shape[1])[:, classes.astype(jnp.int32)]
        # An index past the end is dropped.
        at = jnp.where(states > 0, states, NUM_STATES)
        at_masks = jnp.where(plan["masks"] > 0, plan["masks"], NUM_MASKS)
        return Automata(
            masks=self.masks.at[at_masks].set(_words(allowed), mode="drop"),
            state_masks=self.state_masks.at[at].set(plan["state_masks"], mode="drop"),
            forced=self.forced.at[at].set(plan["forced"], mode="drop"),
            next=self.next.at[at].set(following, mode="drop"),
            limited=self.limited.at[at].set(plan["limited"], mode="drop"),
            automaton=self.automaton.at[at].set(index, mode="drop"),
            classes=self.classes.at[jnp.where(index > 0, index, NUM_AUTOMATA)].set(
                classes, mode="drop"
            ),
        )

    def masks_of(self, states: Int[Array, " n"]) -> Int[Array, "n words"]:
        """Return the masks (int32) of the tokens that each state allows."""
        return self.masks[self.state_masks[_index_of(states)]]

    def after(self, states: Int[Array, " n"], tokens: Int[Array, " n"]) -> Int[Array, " n"]:
        """Return the states (int32) after `tokens`; -1 is no token, and a refused one stays."""
        at, left = _index_of(states), states >> STATE_BITS
        following = self._following(at, tokens)
        left -= ((left > 1) & (self.limited[at] != at)).astype(jnp.int32)
        moved = jnp.where(left == 1, self.limited[following], following) + (left << STATE_BITS)
        return jnp.where(following < 0, states, moved)

    def _following(self, at: Int[Array, " n"], tokens: Int[Array, " n"]) -> Int[Array, " n"]:
        """Return the indices (int32) of the states after `tokens`; -1 for refused and negative."""
        classes = self.classes[self.automaton[at], jnp.maximum(tokens, 0)]
        following = self.next[at, classes.astype(jnp.int32)].astype(jnp.int32)
        return jnp.where(tokens < 0, -1, following)

    def along(
        self, states: Int[Array, " rows"], tokens: Int[Array, "rows n"]
    ) -> Int[Array, "rows n+1"]:
        """Return the states (int32) before the tokens, and after each of them."""
        found = [states]
        for place in range(tokens.shape[1]):
            found.append(self.after(found[-1], tokens[:, place]))
        return jnp.stack(found, axis=1)

    def allowed_drafts(
        self, states: Int[Array, " rows"], tokens: Int[Array, "rows n"]
    ) -> Int[Array, "rows n"]:
        """Return `tokens` (int32) as drafts from `states`: forced ones in place of refused ones.

        A missing draft (-1) is replaced by a forced token too. A refused draft becomes -1 where no
        token is forced. State 0 refuses no draft.
        """
        found = [tokens[:, :0]]
        for place in range(tokens.shape[1]):
            token = tokens[:, place]
            at = _index_of(states)
            is_refused = (states > 0) & (self._following(at, token) < 0)
            token = jnp.where(is_refused, self.forced[at], token)
            states = self.after(states, token)
            found.append(token[:, None])
        return jnp.concatenate(found, axis=1)


def _index_of(states: Int[Array, " n"]) -> Int[Array, " n"]:
    return states & (NUM_STATES - 1)


def _halves(words: Int[Array, "... n"]) -> Int[Array, "... 2*n"]:
    """Return the int16 halves of int32 words, the lower ones first."""
    *lead, count = words.shape
    return lax.bitcast_convert_type(words, jnp.int16).reshape(*lead, 2 * count)


def _words(bits: Bool[Array, "n vocab"]) -> Int[Array, "n words"]:
    rows, vocab_size = bits.shape
    num_words = -(-vocab_size // 32)
    padded = jnp.pad(bits, ((0, 0), (0, 32 * num_words - vocab_size)))
    padded = padded.reshape(rows, num_words, 32)
    place = jnp.arange(32, dtype=jnp.int32)[None, None, :]
    # Each bit is set at most once, so the sum is their union.
    return jnp.sum(padded.astype(jnp.int32) << place, axis=2, dtype=jnp.int32)

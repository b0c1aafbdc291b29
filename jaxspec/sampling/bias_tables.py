"""Tables of the biases, forbidden ids and newest tokens that do not fit in a request's row."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN
from jaxspec.plan.table_plan import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MORE_STOP_IDS, table_layout


@flax.struct.dataclass
class BiasTables:
    """Biases, bad words, additional stop ids and newest tokens of each slot.

    A row reads the entry of its `table_slot`: its slot, or 0 if its request has no tables. Slot 0
    changes nothing and is never written. The whole entry of a slot is written before its request
    enters the batch (`plan.TABLES`), so values of an earlier request are never read.
    """

    bias: Float[Array, "slots vocab"]  # added to logits
    allowed: Int[Array, "slots width words"]  # one bit per id, by verify position
    bad_words: Int[Array, "slots words length"]  # right-aligned, padded with -1
    more_stop_ids: Int[Array, "slots stops"]  # those that do not fit in the row, padded with -1
    recent: Int[Array, "slots length"]  # newest tokens; token `i` is at `i % length`

    @staticmethod
    def empty(
        num_slots: int, vocab_size: int, width: int, recent: int = MAX_BAD_WORD_TOKENS
    ) -> "BiasTables":
        """Create tables that change nothing, for a verify of `width` tokens per row.

        They store the newest `recent` tokens of a slot.
        """
        words = num_slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
        return BiasTables(
            bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
            allowed=jnp.full((num_slots, width, -(-vocab_size // 32)), -1, jnp.int32),
            bad_words=jnp.full(words, NO_TOKEN, jnp.int32),
            more_stop_ids=jnp.full((num_slots, MORE_STOP_IDS), NO_TOKEN, jnp.int32),
            recent=jnp.full((num_slots, recent), NO_TOKEN, jnp.int32),
        )

    def with_slot(self, packed: Int[Array, " plan"]) -> "BiasTables":
        """Return tables with one slot written from a packed plan (`jaxspec.plan.table_plan`)."""
        slots, vocab_size = self.bias.shape
        plan = table_layout(vocab_size, self.recent.shape[1]).unpack(packed)
        ids = jnp.where(plan["bias_ids"] < 0, vocab_size, plan["bias_ids"])
        bias = jnp.zeros(vocab_size, jnp.float32).at[ids].add(plan["biases"], mode="drop")
        where = jnp.where(plan["slot"] > 0, plan["slot"], slots)
        return BiasTables(
            bias=self.bias.at[where].set(bias, mode="drop"),
            allowed=self.allowed.at[where].set(plan["allowed"][None, :], mode="drop"),
            bad_words=self.bad_words.at[where].set(plan["bad_words"], mode="drop"),
            more_stop_ids=self.more_stop_ids.at[where].set(plan["more_stop_ids"], mode="drop"),
            recent=self.recent.at[where].set(plan["recent"], mode="drop"),
        )

    def with_masks(
        self, slots: Int[Array, " n"], masks: Int[Array, "n width words"]
    ) -> "BiasTables":
        """Return tables with `masks` as the allowed ids of `slots`; slot 0 is skipped."""
        where = jnp.where(slots > 0, slots, self.allowed.shape[0])
        return dataclasses.replace(self, allowed=self.allowed.at[where].set(masks, mode="drop"))

    def masks_at(
        self, slots: Int[Array, " n"], verify_positions: Int[Array, " n"]
    ) -> Int[Array, "n words"]:
        """Return the masks (int32) of allowed ids at `verify_positions`, from 0 on."""
        return self.allowed[slots, verify_positions]

    def with_tokens(
        self, slots: Int[Array, " n"], tokens: Int[Array, " n"], indices: Int[Array, " n"]
    ) -> "BiasTables":
        """Return tables with `tokens` stored as the newest ones; rows in slot 0 are skipped.

        `indices` are those of the tokens in their requests. Within one request they must differ by
        less than `length`, or two tokens would share an entry.
        """
        where = jnp.where(slots > 0, slots, self.recent.shape[0])
        column = indices % self.recent.shape[1]
        return dataclasses.replace(
            self, recent=self.recent.at[where, column].set(tokens, mode="drop")
        )

    def ends_of_bad_words(
        self, slots: Int[Array, " n"], before: Int[Array, "n prefix"]
    ) -> Int[Array, "n words"]:
        """Return the ids (int32) that would complete a bad word after the tokens `before`; else -1.

        `before` holds the output's last tokens, one fewer than words have, and -1 for none.
        """
        words = self.bad_words[slots]
        start, end = words[:, :, :-1], words[:, :, -1]
        is_there = jnp.all((start == NO_TOKEN) | (start == before[:, None, :]), axis=2)
        return jnp.where(is_there, end, NO_TOKEN)

"""BiasTables: what each request forbids and favours, where that is more than its row holds."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN
from jaxspec.table_plan import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MORE_STOP_IDS, table_layout


@flax.struct.dataclass
class BiasTables:
    """By slot. A row reads those of its `table_slot`; slot 0 has none, and nothing writes there.

    So a request without tables is never touched by what a former one left in its slot, and one
    with tables has all of its slot's written before it enters (`plan.TABLES`).
    """

    bias: Float[Array, "slots vocab"]  # added to logits; -inf: the id is not allowed
    bad_words: Int[Array, "slots words length"]  # each behind a padding of -1
    more_stop_ids: Int[Array, "slots stops"]  # behind those of the row; -1: none
    recent: Int[Array, "slots length"]  # the newest tokens, at their index modulo `length`

    @staticmethod
    def empty(num_slots: int, vocab_size: int) -> "BiasTables":
        """Tables that change nothing."""
        words = num_slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
        return BiasTables(
            bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
            bad_words=jnp.full(words, NO_TOKEN, jnp.int32),
            more_stop_ids=jnp.full((num_slots, MORE_STOP_IDS), NO_TOKEN, jnp.int32),
            recent=jnp.full((num_slots, MAX_BAD_WORD_TOKENS), NO_TOKEN, jnp.int32),
        )

    def with_slot(self, packed: Int[Array, " plan"]) -> "BiasTables":
        """With the tables of one slot as a plan has them (`jaxspec.table_plan`)."""
        slots, vocab_size = self.bias.shape
        plan = table_layout(vocab_size).unpack(packed)
        bit = jnp.arange(32, dtype=jnp.int32)[None, :]
        is_allowed = (plan["allowed"][:, None] >> bit).reshape(-1)[:vocab_size] & 1
        bias = jnp.where(is_allowed == 1, 0.0, -jnp.inf).astype(jnp.float32)
        ids = jnp.where(plan["bias_ids"] < 0, vocab_size, plan["bias_ids"])
        bias = bias.at[ids].add(plan["biases"], mode="drop")
        where = jnp.where(plan["slot"] > 0, plan["slot"], slots)
        return BiasTables(
            bias=self.bias.at[where].set(bias, mode="drop"),
            bad_words=self.bad_words.at[where].set(plan["bad_words"], mode="drop"),
            more_stop_ids=self.more_stop_ids.at[where].set(plan["more_stop_ids"], mode="drop"),
            recent=self.recent.at[where].set(NO_TOKEN, mode="drop"),
        )

    def with_tokens(
        self, slots: Int[Array, " n"], tokens: Int[Array, " n"], indices: Int[Array, " n"]
    ) -> "BiasTables":
        """With tokens at their index in their request; slot 0 takes none.

        No two of a request may be `length` apart or more.
        """
        where = jnp.where(slots > 0, slots, self.recent.shape[0])
        column = indices % self.recent.shape[1]
        return dataclasses.replace(
            self, recent=self.recent.at[where, column].set(tokens, mode="drop")
        )

    def ends_of_bad_words(
        self, slots: Int[Array, " n"], before: Int[Array, "n prefix"]
    ) -> Int[Array, "n words"]:
        """The ids (int32) that would complete a bad word behind the tokens `before`; else -1.

        `before` has the last `length - 1` tokens of output, and -1 where there are none.
        """
        words = self.bad_words[slots]
        start, end = words[:, :, :-1], words[:, :, -1]
        is_there = jnp.all((start == NO_TOKEN) | (start == before[:, None, :]), axis=2)
        return jnp.where(is_there, end, NO_TOKEN)

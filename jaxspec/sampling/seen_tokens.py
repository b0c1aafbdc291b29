"""SeenTokens: which ids each request has had, in its prompt and in its output."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_INT16_MAX = 2**15 - 1


@flax.struct.dataclass
class SeenTokens:
    """By slot, and as every pool: of the tokens whose index is below `num_computed`.

    So a rejected draft is in no count, and nothing is rolled back. The tokens that a step is about
    to compute come on top of it (`SamplingInputs.tokens`).
    """

    in_prompt: Bool[Array, "slots vocab"]
    counts: Int[Array, "slots vocab"]  # how often each id was output; int16 where that is enough

    @staticmethod
    def empty(num_slots: int, vocab_size: int, max_model_len: int) -> "SeenTokens":
        """Nothing, for requests of at most `max_model_len` tokens."""
        shape = num_slots, vocab_size
        dtype = jnp.int16 if max_model_len <= _INT16_MAX else jnp.int32
        return SeenTokens(jnp.zeros(shape, bool), jnp.zeros(shape, dtype))

    def cleared(self, slots: Int[Array, " n"]) -> "SeenTokens":
        """With nothing in `slots`; a number that is no slot clears none."""
        return SeenTokens(
            self.in_prompt.at[slots].set(False, mode="drop"),
            self.counts.at[slots].set(0, mode="drop"),
        )

    def with_tokens(
        self,
        slots: Int[Array, " n"],
        tokens: Int[Array, " n"],
        is_prompt: Bool[Array, " n"],
        is_true: Bool[Array, " n"],
    ) -> "SeenTokens":
        """With the tokens that are true, those of a prompt apart from the others."""
        nowhere = self.counts.shape[0]
        prompts = jnp.where(is_true & is_prompt, slots, nowhere)
        outputs = jnp.where(is_true & ~is_prompt, slots, nowhere)
        return SeenTokens(
            self.in_prompt.at[prompts, tokens].set(True, mode="drop"),
            self.counts.at[outputs, tokens].add(1, mode="drop"),
        )

    def copied(self, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> "SeenTokens":
        """With each target slot as its source; a target of 0 is padding."""
        where = jnp.where(targets > 0, targets, self.counts.shape[0])
        return SeenTokens(
            self.in_prompt.at[where].set(self.in_prompt[sources], mode="drop"),
            self.counts.at[where].set(self.counts[sources], mode="drop"),
        )

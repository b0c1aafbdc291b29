"""Token ids seen in the prompt and output of each request, for penalties."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_INT16_MAX = 2**15 - 1


@flax.struct.dataclass
class SeenTokens:
    """Ids and counts by slot, of the tokens whose index is below `num_computed`.

    Rejected drafts are never counted, so nothing is rolled back. The tokens that a step is about to
    compute are not included; see `SamplingInputs.tokens`.
    """

    in_prompt: Bool[Array, "slots vocab"]
    counts: Int[Array, "slots vocab"]  # occurrences in the output; int16 if large enough

    @staticmethod
    def empty(num_slots: int, vocab_size: int, max_model_len: int) -> "SeenTokens":
        """Create empty tables for requests of at most `max_model_len` tokens."""
        shape = num_slots, vocab_size
        dtype = jnp.int16 if max_model_len <= _INT16_MAX else jnp.int32
        return SeenTokens(jnp.zeros(shape, bool), jnp.zeros(shape, dtype))

    def cleared(self, slots: Int[Array, " n"]) -> "SeenTokens":
        """Return tables with `slots` cleared; numbers after the last slot are ignored."""
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
        """Return tables with the tokens where `is_true`, prompt and output tokens apart."""
        nowhere = self.counts.shape[0]
        prompts = jnp.where(is_true & is_prompt, slots, nowhere)
        outputs = jnp.where(is_true & ~is_prompt, slots, nowhere)
        return SeenTokens(
            self.in_prompt.at[prompts, tokens].set(True, mode="drop"),
            self.counts.at[outputs, tokens].add(1, mode="drop"),
        )

    def copied(self, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> "SeenTokens":
        """Return tables with `sources` copied to `targets`; a target of 0 is padding."""
        where = jnp.where(targets > 0, targets, self.counts.shape[0])
        return SeenTokens(
            self.in_prompt.at[where].set(self.in_prompt[sources], mode="drop"),
            self.counts.at[where].set(self.counts[sources], mode="drop"),
        )

"""Verifiers: the ways to decide on drafts, one of which an engine is built with."""

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.sampler import Sampler
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.rejection import verify_block, verify_rejection
from jaxspec.sampling.verify import Acceptance, verify_exact, verify_synthetic
from jaxspec.speculation import SpeculativeConfig


class Verifier(Protocol):
    """Frozen and hashable: part of a program's static shape."""

    def __call__(
        self,
        target_tokens: Int[Array, "rows emits"],
        logits: Float[Array, "rows emits vocab"] | None,
        draft_tokens: Int[Array, "rows drafts"],
        draft_logits: Float[Array, "rows drafts vocab"] | None,
        inputs: SamplingInputs,
        positions: Int[Array, "rows emits"],
        *,
        sampler: Sampler,
    ) -> Acceptance:
        """Which drafts stand, and the token after them.

        `target_tokens` (int32) are the target's own, as plain decoding would have them there, and
        `logits` (float32) what they were drawn from, or None where the `sampler` makes none.
        `positions` (int32) is the index in its request of each token.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ExactVerifier:
    """One-hot drafts stand where the target draws the same token: lossless, token for token."""

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, sampler
    ):
        """See `Verifier`; no logits are read."""
        return verify_exact(target_tokens, draft_tokens)


@dataclasses.dataclass(frozen=True)
class RejectionVerifier:
    """Drawn drafts stand by rejection sampling: lossless in distribution."""

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, sampler
    ):
        """See `Verifier`; `target_tokens` are read where there is no chance."""
        if not sampler.draws:
            return verify_exact(target_tokens, draft_tokens)
        return verify_rejection(
            logits, draft_tokens, draft_logits, inputs, positions, sampler=sampler
        )


@dataclasses.dataclass(frozen=True)
class BlockVerifier:
    """Drawn drafts are judged together: lossless in distribution, and the most that stand."""

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, sampler
    ):
        """See `Verifier`; `target_tokens` are read where there is no chance."""
        if not sampler.draws:
            return verify_exact(target_tokens, draft_tokens)
        return verify_block(logits, draft_tokens, draft_logits, inputs, positions, sampler=sampler)


@dataclasses.dataclass(frozen=True)
class SyntheticVerifier:
    """Draft j stands with unconditional rate `rates[j]`, whatever the target says. Lossy."""

    rates: tuple[float, ...]

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, sampler
    ):
        """See `Verifier`; no logits are read."""
        rates = jnp.asarray(self.rates[: draft_tokens.shape[1]], jnp.float32)
        return verify_synthetic(target_tokens, draft_tokens, rates, inputs.seed, positions)


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    """How drafts are decided on; plain decoding is exact verification of no drafts."""
    if config is not None and config.synthetic_acceptance_rates is not None:
        return SyntheticVerifier(config.synthetic_acceptance_rates)
    if config is not None and config.draft_sample_method == "probabilistic":
        is_block = config.rejection_sample_method == "block"
        return BlockVerifier() if is_block else RejectionVerifier()
    return ExactVerifier()

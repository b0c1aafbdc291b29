"""Verifiers: the rules that accept or reject drafts. An engine is built with one of them."""

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.options import SpeculativeConfig
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.rejection import verify_block, verify_rejection
from jaxspec.sampling.verify import Acceptance, verify_exact, verify_synthetic


class Verifier(Protocol):
    """Rule that accepts or rejects drafts. Frozen and hashable, as static part of a program."""

    def __call__(
        self,
        target_tokens: Int[Array, "rows emits"],
        logits: Float[Array, "rows emits vocab"] | None,
        draft_tokens: Int[Array, "rows drafts"],
        draft_logits: Float[Array, "rows drafts vocab"] | None,
        inputs: SamplingInputs,
        positions: Int[Array, "rows emits"],
        *,
        features: SamplingFeatures,
    ) -> Acceptance:
        """Return the accepted drafts, and the token after them.

        `target_tokens` (int32) are those of the target, as plain decoding would draw them, and
        `logits` (float32) what they were drawn from, or None if `features` make no logits.
        `positions` (int32) is the index in its request of each token.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ExactVerifier:
    """Accept one-hot drafts where the target draws the same token: lossless, token for token."""

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, features
    ):
        return verify_exact(target_tokens, draft_tokens)


@dataclasses.dataclass(frozen=True)
class RejectionVerifier:
    """Verify drawn drafts by rejection sampling: lossless in distribution."""

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, features
    ):
        if not features.draws:
            return verify_exact(target_tokens, draft_tokens)
        return verify_rejection(
            logits, draft_tokens, draft_logits, inputs, positions, features=features
        )


@dataclasses.dataclass(frozen=True)
class BlockVerifier:
    """Verify drawn drafts together: lossless in distribution, with the most accepted drafts."""

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, features
    ):
        if not features.draws:
            return verify_exact(target_tokens, draft_tokens)
        return verify_block(
            logits, draft_tokens, draft_logits, inputs, positions, features=features
        )


@dataclasses.dataclass(frozen=True)
class SyntheticVerifier:
    """Accept drafts at given rates, regardless of the target. Lossy.

    `rates[j]` is the probability that draft `j` and all before it are accepted.
    """

    rates: tuple[float, ...]

    def __call__(
        self, target_tokens, logits, draft_tokens, draft_logits, inputs, positions, *, features
    ):
        rates = jnp.asarray(self.rates[: draft_tokens.shape[1]], jnp.float32)
        return verify_synthetic(target_tokens, draft_tokens, rates, inputs.seed, positions)


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    """Return the verifier of `config`; plain decoding is exact verification of no drafts."""
    if config is not None and config.synthetic_acceptance_rates is not None:
        return SyntheticVerifier(config.synthetic_acceptance_rates)
    if config is not None and config.draft_sample_method == "probabilistic":
        is_block = config.rejection_sample_method == "block"
        return BlockVerifier() if is_block else RejectionVerifier()
    return ExactVerifier()

"""Verifiers: the ways to decide on drafts, one of which an engine is built with."""

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import Variant
from jaxspec.sampling.draw import draw
from jaxspec.sampling.params import SamplingInputs
from jaxspec.sampling.verify import Acceptance, verify_exact, verify_rejection, verify_synthetic
from jaxspec.speculation import SpeculativeConfig


class Verifier(Protocol):
    """Frozen and hashable: part of a program's static shape."""

    def __call__(
        self,
        logits: Float[Array, "rows emits vocab"],
        draft_tokens: Int[Array, "rows drafts"],
        draft_logits: Float[Array, "rows drafts vocab"] | None,
        inputs: SamplingInputs,
        positions: Int[Array, "rows emits"],
        *,
        variant: Variant,
    ) -> Acceptance:
        """Which drafts stand, and the token after them. `positions`: index of each token drawn."""
        ...


def draw_targets(
    logits: Float[Array, "rows emits vocab"],
    inputs: SamplingInputs,
    positions: Int[Array, "rows emits"],
    variant: Variant,
) -> Int[Array, "rows emits"]:
    """The target's own token at every position, as plain decoding would draw it there."""
    rows, width, vocab = logits.shape
    tokens = draw(
        logits.reshape(rows * width, vocab),
        inputs.repeat(width),
        positions.reshape(-1),
        variant=variant,
    )
    return tokens.reshape(rows, width)


@dataclasses.dataclass(frozen=True)
class ExactVerifier:
    """One-hot drafts stand where the target draws the same token: lossless, token for token."""

    def __call__(self, logits, draft_tokens, draft_logits, inputs, positions, *, variant):
        """See `Verifier`; `draft_logits` are not read."""
        return verify_exact(draw_targets(logits, inputs, positions, variant), draft_tokens)


@dataclasses.dataclass(frozen=True)
class RejectionVerifier:
    """Drawn drafts stand by rejection sampling: lossless in distribution."""

    def __call__(self, logits, draft_tokens, draft_logits, inputs, positions, *, variant):
        """See `Verifier`."""
        return verify_rejection(
            logits, draft_tokens, draft_logits, inputs, positions, variant=variant
        )


@dataclasses.dataclass(frozen=True)
class SyntheticVerifier:
    """Draft j stands with unconditional rate `rates[j]`, whatever the target says. Lossy."""

    rates: tuple[float, ...]

    def __call__(self, logits, draft_tokens, draft_logits, inputs, positions, *, variant):
        """See `Verifier`; `draft_logits` are not read."""
        targets = draw_targets(logits, inputs, positions, variant)
        rates = jnp.asarray(self.rates, jnp.float32)
        return verify_synthetic(targets, draft_tokens, rates, inputs.seeds, positions)


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    """How drafts are decided on; plain decoding is exact verification of no drafts."""
    if config is not None and config.synthetic_acceptance_rates is not None:
        return SyntheticVerifier(config.synthetic_acceptance_rates)
    if config is not None and config.draft_sample_method == "probabilistic":
        return RejectionVerifier()
    return ExactVerifier()

"""Sampling: logits processors, token and draft sampling, and verification of drafts."""

from jaxspec.sampling.draw import draw, draw_draft
from jaxspec.sampling.noise import Use, gumbel_noise, uniform_noise
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.processors import forbidden_ids
from jaxspec.sampling.rejection import verify_block, verify_rejection
from jaxspec.sampling.verifiers import (
    BlockVerifier,
    ExactVerifier,
    RejectionVerifier,
    SyntheticVerifier,
    Verifier,
    make_verifier,
)
from jaxspec.sampling.verify import Acceptance, verify_exact

__all__ = [
    "NO_TOKEN",
    "Acceptance",
    "BlockVerifier",
    "ExactVerifier",
    "RejectionVerifier",
    "SamplingInputs",
    "SyntheticVerifier",
    "Use",
    "Verifier",
    "draw",
    "draw_draft",
    "forbidden_ids",
    "gumbel_noise",
    "make_verifier",
    "uniform_noise",
    "verify_block",
    "verify_exact",
    "verify_rejection",
]

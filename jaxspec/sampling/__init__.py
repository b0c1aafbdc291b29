"""Logits to tokens: the processors, the draw, and the verification of drafts."""

from jaxspec.sampling.draw import Use, draw, draw_draft, gumbel_noise, uniform_noise
from jaxspec.sampling.params import NO_TOKEN, SamplingInputs
from jaxspec.sampling.processors import forbidden_ids
from jaxspec.sampling.verifiers import (
    ExactVerifier,
    RejectionVerifier,
    SyntheticVerifier,
    Verifier,
    make_verifier,
)
from jaxspec.sampling.verify import Acceptance, verify_exact, verify_rejection

__all__ = [
    "NO_TOKEN",
    "Acceptance",
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
    "verify_exact",
    "verify_rejection",
]

"""What users may say of drafts that are looked up in all texts of the engine."""

import dataclasses
from typing import ClassVar

from jaxspec.checks import integer, real, shown

_MOST_DEPTH = 256
_MOST_FACTOR = 64.0


@dataclasses.dataclass(frozen=True)
class SuffixOptions:
    """Drafts that followed the same last tokens before, in this request or in another one.

    "SuffixDecoding" (Oliaro et al. 2024, arXiv 2411.04975), with the names and defaults of vLLM:
    of equally long matches the most frequent continuation is drafted, as far as it is likely. Texts
    that have ended are kept up to 524,288 tokens together; the oldest go first.
    """

    suffix_decoding_max_tree_depth: int = 24  # tokens of a match that are told apart
    suffix_decoding_max_cached_requests: int = 10_000  # that have ended; 0 keeps those that run
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token of the match
    suffix_decoding_min_token_prob: float = 0.1  # the least share of places that go on so
    num_drafts: ClassVar[int] = 8
    has_distribution: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check every number."""
        keep = object.__setattr__
        for name, least, most in (
            ("suffix_decoding_max_tree_depth", 1, _MOST_DEPTH),
            ("suffix_decoding_max_cached_requests", 0, 2**31 - 1),
        ):
            keep(self, name, integer(name, getattr(self, name), least, most))
        for name, most in (
            ("suffix_decoding_max_spec_factor", _MOST_FACTOR),
            ("suffix_decoding_min_token_prob", 1.0),
        ):
            value = real(getattr(self, name))
            if not 0 <= value <= most:
                raise ValueError(
                    f"{name} must be a number from 0 to {most:g}, got {shown(getattr(self, name))}."
                )
            keep(self, name, value)

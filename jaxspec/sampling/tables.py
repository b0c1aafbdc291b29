"""SamplingTables: what sampling knows of each slot, beside what a row holds."""

import flax.struct

from jaxspec.sampler import BIAS, PENALTIES, Sampler
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.seen_tokens import SeenTokens


@flax.struct.dataclass
class SamplingTables:
    """Each part belongs to a processor; a program gets the parts of its own processors alone."""

    seen: SeenTokens | None = None  # PENALTIES
    bias: BiasTables | None = None  # BIAS

    @staticmethod
    def empty(num_slots: int, vocab_size: int, max_model_len: int) -> "SamplingTables":
        """Those of an engine without requests."""
        return SamplingTables(
            seen=SeenTokens.empty(num_slots, vocab_size, max_model_len),
            bias=BiasTables.empty(num_slots, vocab_size),
        )

    @property
    def is_empty(self) -> bool:
        """Whether it has no part."""
        return self.seen is None and self.bias is None

    def of(self, sampler: Sampler) -> "SamplingTables":
        """What a program with this sampler reads and replaces."""
        return SamplingTables(
            seen=self.seen if PENALTIES in sampler else None,
            bias=self.bias if BIAS in sampler else None,
        )

    def replaced_by(self, newer: "SamplingTables") -> "SamplingTables":
        """With the parts that `newer` has."""
        return SamplingTables(
            seen=self.seen if newer.seen is None else newer.seen,
            bias=self.bias if newer.bias is None else newer.bias,
        )

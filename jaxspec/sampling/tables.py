"""Sampling tables: the sampling state of each slot that does not fit in a row."""

import flax.struct

from jaxspec.plan.table_plan import MAX_BAD_WORD_TOKENS
from jaxspec.requests.sampling_features import BIAS, PENALTIES, SamplingFeatures
from jaxspec.sampling.automata import Automata
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.processor_tables import ProcessorTables
from jaxspec.sampling.seen_tokens import SeenTokens


@flax.struct.dataclass
class SamplingTables:
    """Tables of the processors; a program gets those of its processors alone."""

    seen: SeenTokens | None = None  # PENALTIES; by slot
    bias: BiasTables | None = None  # BIAS; by slot
    automata: Automata | None = None  # BIAS
    processors: ProcessorTables | None = None  # BIAS, in engines with logits processors; by slot

    @staticmethod
    def empty(
        num_slots: int,
        vocab_size: int,
        max_model_len: int,
        width: int,
        recent: int = MAX_BAD_WORD_TOKENS,
        processors: ProcessorTables | None = None,
    ) -> "SamplingTables":
        """Create the tables of an engine that verifies `width` tokens per row.

        They store the newest `recent` tokens of a slot.
        """
        return SamplingTables(
            seen=SeenTokens.empty(num_slots, vocab_size, max_model_len),
            bias=BiasTables.empty(num_slots, vocab_size, width, recent),
            automata=Automata.empty(vocab_size),
            processors=processors,
        )

    @property
    def is_empty(self) -> bool:
        return self.seen is None and self.bias is None

    def of(self, features: SamplingFeatures) -> "SamplingTables":
        """Return the tables that a program with this feature set reads and updates."""
        return SamplingTables(
            seen=self.seen if PENALTIES in features else None,
            bias=self.bias if BIAS in features else None,
            automata=self.automata if BIAS in features else None,
            processors=self.processors if BIAS in features else None,
        )

    def replaced_by(self, newer: "SamplingTables") -> "SamplingTables":
        """Return these tables, replaced by those of `newer` where it has them."""
        return SamplingTables(
            seen=self.seen if newer.seen is None else newer.seen,
            bias=self.bias if newer.bias is None else newer.bias,
            automata=self.automata if newer.automata is None else newer.automata,
            processors=self.processors if newer.processors is None else newer.processors,
        )

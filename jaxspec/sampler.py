"""Sampler: what a compiled program's sampling can do, and the least that a request needs of it.

The host chooses it and the device acts on it (`jaxspec.sampling.processors`), so it is data: names,
and no JAX here.
"""

import functools
import operator
from collections.abc import Iterable
from typing import NamedTuple

BIAS = "bias"
PENALTIES = "penalties"
TEMPERATURE = "temperature"
MIN_P = "min_p"
SMALL_TOP_K = "small_top_k"
TOP_K_TOP_P = "top_k_top_p"

MAX_SMALL_TOP_K = 128
"""The largest top-k that is small: so many ids are found without a search of the vocabulary."""


class Sampler(NamedTuple):
    """The logits processors that a program applies; without any it is greedy and makes no logits.

    Samplers form a lattice: `a | b`, the least that can do what `a` and `b` can, serves a step with
    rows of both. A richer sampler gives a row that does not need it the same tokens. A named tuple,
    for its hash: the host joins the samplers of all rows in each step.
    """

    processors: tuple[str, ...]  # names in `sampling.processors.PROCESSORS`, ascending, each once

    @staticmethod
    def of(*processors: str) -> "Sampler":
        """The sampler that applies `processors`, named in any order.

        `TOP_K_TOP_P` does what `SMALL_TOP_K` does, and takes its place.
        """
        names = set(processors)
        if TOP_K_TOP_P in names:
            names.discard(SMALL_TOP_K)
        return Sampler(tuple(sorted(names)))

    def __contains__(self, processor: object) -> bool:
        """Whether it applies the processor of this name."""
        return processor in self.processors

    def __or__(self, other: "Sampler") -> "Sampler":
        """The join."""
        return Sampler.of(*self.processors, *other.processors)

    @property
    def makes_logits(self) -> bool:
        """Whether tokens are chosen from logits; if not, the LM head gives its argmax alone."""
        return bool(self.processors)

    @property
    def draws(self) -> bool:
        """Whether some row may take another token than the likeliest one."""
        return TEMPERATURE in self

    def __str__(self) -> str:
        """Its word in `SAMPLERS`, or the names of its processors: part of a program's name."""
        words = {sampler: word for word, sampler in SAMPLERS.items()}
        return words.get(self, "_and_".join(self.processors))

    @staticmethod
    def named(word: str) -> "Sampler":
        """The sampler that users call "greedy", "sampled", "top_k" or "full".

        Raises:
            ValueError: no sampler has this name.
        """
        if word not in SAMPLERS:
            raise ValueError(f"A sampler must be one of {list(SAMPLERS)}, got {word!r}.")
        return SAMPLERS[word]


GREEDY = Sampler.of()
SAMPLED = Sampler.of(TEMPERATURE)
TOP_K = Sampler.of(TEMPERATURE, SMALL_TOP_K)
FULL = Sampler.of(TEMPERATURE, TOP_K_TOP_P)
# The words that users know.
SAMPLERS = {"greedy": GREEDY, "sampled": SAMPLED, "top_k": TOP_K, "full": FULL}


def join(samplers: Iterable[Sampler]) -> Sampler:
    """The least sampler that can do what all of `samplers` can."""
    return functools.reduce(operator.or_, set(samplers), GREEDY)


def closed_under_join(samplers: Iterable[Sampler]) -> list[Sampler]:
    """`samplers` and every join of some of them: all that steps of their rows may need.

    The ones with the fewest processors come first.
    """
    closed: set[Sampler] = set()
    for sampler in samplers:
        closed |= {sampler} | {sampler | other for other in closed}
    return sorted(closed, key=lambda sampler: (len(sampler.processors), sampler.processors))

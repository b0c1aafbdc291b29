"""Sampler: what a compiled program's sampling can do, and the least that a request needs of it.

The host chooses it and the device acts on it (`jaxspec.sampling.processors`), so it is data: names,
and no JAX here.
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxspec.checks import items, shown

_MAX_WORDS = 1024
TEMPERATURE = "temperature"
TOP_K_TOP_P = "top_k_top_p"


class Sampler(NamedTuple):
    """The logits processors that a program applies; without any it is greedy and makes no logits.

    Samplers form a lattice: `a | b`, the least that can do what `a` and `b` can, serves a step with
    rows of both. A richer sampler gives a row that does not need it the same tokens. A named tuple,
    for its hash: the host joins the samplers of all rows in each step.
    """

    processors: tuple[str, ...]  # names in `sampling.processors.PROCESSORS`, ascending, each once

    @staticmethod
    def of(*processors: str) -> "Sampler":
        """The sampler that applies `processors`, named in any order."""
        return Sampler(tuple(sorted(set(processors))))

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
        return TEMPERATURE in self.processors

    def __str__(self) -> str:
        """Its word in `SAMPLERS`, or the names of its processors: part of a program's name."""
        words = {sampler: word for word, sampler in SAMPLERS.items()}
        return words.get(self, "_and_".join(self.processors))

    @staticmethod
    def named(word: str) -> "Sampler":
        """The sampler that users call "greedy", "sampled" or "full".

        Raises:
            ValueError: no sampler has this name.
        """
        if not isinstance(word, str) or word not in SAMPLERS:
            raise ValueError(f"samplers must be words of {list(SAMPLERS)}, got {shown(word)}.")
        return SAMPLERS[word]


GREEDY = Sampler.of()
SAMPLED = Sampler.of(TEMPERATURE)
FULL = Sampler.of(TEMPERATURE, TOP_K_TOP_P)
SAMPLERS = {"greedy": GREEDY, "sampled": SAMPLED, "full": FULL}  # the words that users know


def samplers_named(words: Any) -> list[Sampler]:
    """The samplers of one word or several.

    Raises:
        ValueError: a word names no sampler.
    """
    listed = [words] if isinstance(words, str) else items(words, _MAX_WORDS)
    if listed is None:
        raise ValueError(f"samplers must be words of {list(SAMPLERS)}, got {shown(words)}.")
    return list(map(Sampler.named, listed))


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

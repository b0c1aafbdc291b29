"""Sampler: what a compiled program's sampling can do, and the least that a request needs of it.

The host chooses it and the device acts on it (`jaxspec.sampling.processors`, `runner.logprobs`), so
it is data: names, and no JAX here.
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxspec.checks import items, shown

_MAX_WORDS = 1024
BIAS = "bias"
PENALTIES = "penalties"
TEMPERATURE = "temperature"
MIN_P = "min_p"
SMALL_TOP_K = "small_top_k"
TOP_K_TOP_P = "top_k_top_p"
LOGPROBS = "logprobs"
PROMPT_LOGPROBS = "prompt_logprobs"
REPORTS = LOGPROBS, PROMPT_LOGPROBS  # what a program tells besides its tokens

MAX_SMALL_TOP_K = 128
"""The largest top-k that is small: so many ids are found without a search of the vocabulary."""


class Sampler(NamedTuple):
    """The logits processors that a program applies, and what it reports besides tokens.

    Without any of them it is greedy and makes no logits. Samplers form a lattice: `a | b`, the
    least that can do what `a` and `b` can, serves a step with rows of both. A richer sampler gives
    a row that does not need it the same tokens. A named tuple, for its hash: the host joins the
    samplers of all rows in each step.
    """

    names: tuple[str, ...]  # of processors and `REPORTS`, ascending, each once

    @staticmethod
    def of(*names: str) -> "Sampler":
        """The sampler that can do what is named, in any order.

        `TOP_K_TOP_P` does what `SMALL_TOP_K` does, and takes its place.
        """
        wanted = set(names)
        if TOP_K_TOP_P in wanted:
            wanted.discard(SMALL_TOP_K)
        return Sampler(tuple(sorted(wanted)))

    def __contains__(self, name: object) -> bool:
        """Whether it can do what is named."""
        return name in self.names

    def __or__(self, other: "Sampler") -> "Sampler":
        """The join."""
        return Sampler.of(*self.names, *other.names)

    def without(self, name: str) -> "Sampler":
        """The sampler that can do all but what is named."""
        return Sampler.of(*(own for own in self.names if own != name))

    @property
    def processors(self) -> tuple[str, ...]:
        """Names in `sampling.processors.PROCESSORS`."""
        return tuple(name for name in self.names if name not in REPORTS)

    @property
    def makes_logits(self) -> bool:
        """Whether tokens are chosen from logits; if not, the LM head gives its argmax alone."""
        return bool(self.processors) or LOGPROBS in self

    @property
    def draws(self) -> bool:
        """Whether some row may take another token than the likeliest one."""
        return TEMPERATURE in self

    def __str__(self) -> str:
        """Its word in `SAMPLERS`, or its names: part of a program's name."""
        words = {sampler: word for word, sampler in SAMPLERS.items()}
        return words.get(self, "_and_".join(self.names))

    @staticmethod
    def named(word: str) -> "Sampler":
        """The sampler that users call "greedy", "sampled", "top_k" or "full".

        Raises:
            ValueError: no sampler has this name.
        """
        if not isinstance(word, str) or word not in SAMPLERS:
            raise ValueError(f"samplers must be words of {list(SAMPLERS)}, got {shown(word)}.")
        return SAMPLERS[word]


GREEDY = Sampler.of()
SAMPLED = Sampler.of(TEMPERATURE)
TOP_K = Sampler.of(TEMPERATURE, SMALL_TOP_K)
FULL = Sampler.of(TEMPERATURE, TOP_K_TOP_P)
# The words that users know.
SAMPLERS = {"greedy": GREEDY, "sampled": SAMPLED, "top_k": TOP_K, "full": FULL}


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

    The ones with the fewest names come first.
    """
    closed: set[Sampler] = set()
    for sampler in samplers:
        closed |= {sampler} | {sampler | other for other in closed}
    return sorted(closed, key=lambda sampler: (len(sampler.names), sampler.names))

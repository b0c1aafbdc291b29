"""Sampler: the sampling features of a compiled program, and those that a request needs.

The host chooses it and the device acts on it (`jaxspec.sampling.processors`, `runner.logprobs`), so
it is data: names, and no JAX here. Programs are compiled for the samplers of `LADDER` alone, so
their number does not grow with the kinds of requests.
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
    def of_decoding(self) -> "Sampler":
        """The sampler of a step without a prompt: all features but logprobs of prompts."""
        return self.without(PROMPT_LOGPROBS) if PROMPT_LOGPROBS in self else self

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
        return _WORDS.get(self, "_and_".join(self.names))

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
EVERYTHING = Sampler.of(BIAS, PENALTIES, TEMPERATURE, MIN_P, TOP_K_TOP_P, LOGPROBS)
# Words of the API; the last rung of the ladder has one for the names of its programs alone.
SAMPLERS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "top_k": TOP_K,
    "full": FULL,
    "everything": EVERYTHING,
}
LADDER = GREEDY, TOP_K, EVERYTHING, EVERYTHING | Sampler.of(PROMPT_LOGPROBS)
"""The samplers that programs are compiled for, each of which can do what those before it can.

Logprobs of prompts are a rung of their own: they cost an output head for every prompt token.
"""
_WORDS = {sampler: word for word, sampler in SAMPLERS.items()}
_WORDS[LADDER[-1]] = "everything_and_prompt_logprobs"


def samplers_named(kinds: Any) -> list[Sampler]:
    """The samplers of one kind of requests or several, each a word or parameters.

    Raises:
        ValueError: a word names no sampler.
    """
    is_one = isinstance(kinds, str) or hasattr(kinds, "sampler")
    listed = [kinds] if is_one else items(kinds, _MAX_WORDS)
    if listed is None:
        raise ValueError(
            f"samplers must be words of {list(SAMPLERS)} or SamplingParams, got {shown(kinds)}."
        )
    return [getattr(kind, "sampler", None) or Sampler.named(kind) for kind in listed]


def join(samplers: Iterable[Sampler]) -> Sampler:
    """The least sampler that can do what all of `samplers` can."""
    return functools.reduce(operator.or_, set(samplers), GREEDY)


def rung(needed: Sampler) -> Sampler:
    """Return the least sampler of `LADDER` that can do what is needed.

    A processor that is registered from outside is in none of them: then it is the last rung and
    what is needed.
    """
    found = least(LADDER, needed)
    return found if found in LADDER else LADDER[-1] | needed


def to_compile(samplers: Iterable[Sampler]) -> list[Sampler]:
    """The samplers that serve steps of requests with any of these needs: each, and one for all.

    A step takes the `least` of them that can do what its rows need. So one kind of requests runs
    with what it needs alone, and several kinds together need no program for each mixture. The ones
    with the fewest names come first.
    """
    each = set(samplers)
    return sorted(each | {join(each)}, key=_order) if each else []


@functools.lru_cache(maxsize=1024)
def least(samplers: tuple[Sampler, ...], needed: Sampler) -> Sampler:
    """Among `samplers` the one with the fewest names that can do what is needed; else `needed`."""
    able = [sampler for sampler in samplers if sampler | needed == sampler]
    return min(able, key=_order, default=needed)


def _order(sampler: Sampler) -> tuple[int, tuple[str, ...]]:
    return len(sampler.names), sampler.names

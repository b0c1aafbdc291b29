"""SamplingFeatures: the logits processors and reports of a program, or those that a request needs.

The host chooses them and the device implements them (`jaxspec.sampling.processors`,
`runner.verify`, `runner.logprobs`), so they are plain names without JAX. Programs are compiled only
for the sets of `LADDER`, so their number does not grow with the variety of requests.
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
REPORTS = LOGPROBS, PROMPT_LOGPROBS  # outputs of a program besides tokens

MAX_SMALL_TOP_K = 128
"""Largest top-k of `SMALL_TOP_K`, which selects in one pass instead of searching the vocabulary."""


class SamplingFeatures(NamedTuple):
    """Set of sampling features: logits processors, and reports besides tokens.

    The empty set is greedy and computes no logits. Sets form a lattice: `a | b`, the smallest set
    that includes `a` and `b`, serves a step with rows of both. Features that a row does not need
    leave its tokens unchanged. It is a named tuple for a fast hash: the host joins the sets of all
    rows in each step.
    """

    names: tuple[str, ...]  # processors and `REPORTS`, ascending and unique

    @staticmethod
    def of(*names: str) -> "SamplingFeatures":
        """Return the set of the named features, given in any order.

        `TOP_K_TOP_P` includes `SMALL_TOP_K` and replaces it.
        """
        wanted = set(names)
        if TOP_K_TOP_P in wanted:
            wanted.discard(SMALL_TOP_K)
        return SamplingFeatures(tuple(sorted(wanted)))

    def __contains__(self, name: object) -> bool:
        """Return whether the set has the named feature."""
        return name in self.names

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        """Return the smallest set that includes both."""
        return SamplingFeatures.of(*self.names, *other.names)

    def without(self, name: str) -> "SamplingFeatures":
        """Return the set without the named feature."""
        return SamplingFeatures.of(*(own for own in self.names if own != name))

    @property
    def of_decoding(self) -> "SamplingFeatures":
        """The features of a step without prompt tokens: all but `PROMPT_LOGPROBS`."""
        return self.without(PROMPT_LOGPROBS) if PROMPT_LOGPROBS in self else self

    @property
    def processors(self) -> tuple[str, ...]:
        """Names of the logits processors, keys of `sampling.processors.PROCESSORS`."""
        return tuple(name for name in self.names if name not in REPORTS)

    @property
    def makes_logits(self) -> bool:
        """True if tokens are chosen from logits; otherwise the LM head returns only its argmax."""
        return bool(self.processors) or LOGPROBS in self

    @property
    def draws(self) -> bool:
        """True if tokens are sampled, not the likeliest ones."""
        return TEMPERATURE in self

    def __str__(self) -> str:
        """Return its key in `SAMPLERS`, or its joined names, as used in the names of programs."""
        return _WORDS.get(self, "_and_".join(self.names))

    @staticmethod
    def named(word: str) -> "SamplingFeatures":
        """Return the set of a word in `SAMPLERS`, such as "greedy", "sampled", "top_k" or "full".

        Raises:
            ValueError: the word is unknown.
        """
        if not isinstance(word, str) or word not in SAMPLERS:
            raise ValueError(f"feature_sets must be words of {list(SAMPLERS)}, got {shown(word)}.")
        return SAMPLERS[word]


GREEDY = SamplingFeatures.of()
SAMPLED = SamplingFeatures.of(TEMPERATURE)
TOP_K = SamplingFeatures.of(TEMPERATURE, SMALL_TOP_K)
FULL = SamplingFeatures.of(TEMPERATURE, TOP_K_TOP_P)
EVERYTHING = SamplingFeatures.of(BIAS, PENALTIES, TEMPERATURE, MIN_P, TOP_K_TOP_P, LOGPROBS)
# Words of the API. The last rung of `LADDER` has a word only in the names of its programs.
SAMPLERS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "top_k": TOP_K,
    "full": FULL,
    "everything": EVERYTHING,
}
LADDER = GREEDY, TOP_K, EVERYTHING, EVERYTHING | SamplingFeatures.of(PROMPT_LOGPROBS)
"""Feature sets that programs are compiled for; each includes those before it.

Prompt logprobs have a separate rung: they need the output head for every prompt token.
"""
_WORDS = {features: word for word, features in SAMPLERS.items()}
_WORDS[LADDER[-1]] = "everything_and_prompt_logprobs"


def features_named(kinds: Any) -> list[SamplingFeatures]:
    """Return the feature sets of a word or `SamplingParams`, or of a list of them.

    Raises:
        ValueError: a word is unknown, or `kinds` has another type.
    """
    is_one = isinstance(kinds, str) or hasattr(kinds, "features")
    listed = [kinds] if is_one else items(kinds, _MAX_WORDS)
    if listed is None:
        raise ValueError(
            f"feature_sets must be words of {list(SAMPLERS)} or SamplingParams, got {shown(kinds)}."
        )
    return [getattr(kind, "features", None) or SamplingFeatures.named(kind) for kind in listed]


def join(feature_sets: Iterable[SamplingFeatures]) -> SamplingFeatures:
    """Return the smallest set that includes all of `feature_sets`."""
    return functools.reduce(operator.or_, set(feature_sets), GREEDY)


def rung(needed: SamplingFeatures) -> SamplingFeatures:
    """Return the smallest set of `LADDER` that includes `needed`.

    Processors registered by users are in no rung: the last rung joined with `needed` serves them.
    """
    found = least(LADDER, needed)
    return found if found in LADDER else LADDER[-1] | needed


def to_compile(feature_sets: Iterable[SamplingFeatures]) -> list[SamplingFeatures]:
    """Return the feature sets to compile for these requests: each set, and the join of all.

    A step uses the `least` of them that includes the needs of its rows. Requests with equal needs
    then run with exactly these features, and mixtures need no further programs. Sets with the
    fewest names are first.
    """
    each = set(feature_sets)
    return sorted(each | {join(each)}, key=_order) if each else []


@functools.lru_cache(maxsize=1024)
def least(feature_sets: tuple[SamplingFeatures, ...], needed: SamplingFeatures) -> SamplingFeatures:
    """Return the smallest of `feature_sets` that contains `needed`, or `needed` if none does."""
    able = [features for features in feature_sets if features | needed == features]
    return min(able, key=_order, default=needed)


def _order(features: SamplingFeatures) -> tuple[int, tuple[str, ...]]:
    return len(features.names), features.names

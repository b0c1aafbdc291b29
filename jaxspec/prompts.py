"""What a prompt may be: a text, token ids, or a dict of one or both, as vLLM's prompt classes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from jaxspec.checks import are_integers, is_integer, items, shown

MAX_SAMPLES = 2**18
"""Samples of one call; each holds some 1.4 kB from the start."""
MAX_BOUNDARIES = 16
"""Places where one prompt may ask for a state to be kept."""
_MAX_READ = 2**22  # token ids of a prompt that is to be truncated


class TextPrompt(TypedDict):
    """A prompt as text.

    A `cache_salt` keeps prompts apart: only those with the same one share what was computed, so
    nobody else can tell from the time it takes whether there was such a prompt.
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. Its text, if it is given, is only handed through to the output.

    `cache_salt`: as `TextPrompt`'s. `cache_boundaries`: numbers of tokens behind which prompts to
    come will part from this one, or go on. Models with recurrent states keep one there if it is
    worth a step. A chat has its own (docs/prefix-caching.md).
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    cache_boundaries: NotRequired[Sequence[int]]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
_LISTS = (list, tuple, range, np.ndarray)  # of token ids
_KEYS = tuple(TokensPrompt.__annotations__)
_RULE = (
    "A prompt must be a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
)


class PromptParts(NamedTuple):
    """A prompt taken apart; without token ids there is a text."""

    text: str | None
    token_ids: Any = None  # not read yet
    cache_salt: str | None = None
    cache_boundaries: tuple[int, ...] = ()  # whatever the number of tokens


def prompts_of(prompts: Any) -> list[Any]:
    """The prompts of a call: one, or those of an ordered collection or an iterator.

    A collection that begins with an integer is one prompt of token ids.

    Raises:
        ValueError: it is none of these, or too many.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    found = items(prompts, MAX_SAMPLES)
    if found is None:
        raise ValueError(
            "prompts must be a text, token ids, a dict with 'prompt' or 'prompt_token_ids', or a "
            f"list of them, got {shown(prompts)}."
        )
    if found and is_integer(found[0]):
        # What was read of an iterator is gone from it.
        return [itertools.chain(found, prompts) if isinstance(prompts, Iterator) else prompts]
    if len(found) > MAX_SAMPLES:
        raise ValueError(
            f"One call may have at most {MAX_SAMPLES:,} prompts, got more. Make several calls."
        )
    return found


def check_num_samples(counts: Iterable[int]) -> None:
    """Refuse more samples than one call may have; `counts`: those of each prompt.

    Raises:
        ValueError: the sum is above `MAX_SAMPLES`.
    """
    if (count := sum(counts)) > MAX_SAMPLES:
        raise ValueError(
            f"One call may have at most {MAX_SAMPLES:,} samples, got {count:,}. Lower n, or make "
            "several calls."
        )


def check_is_one(what: str, batch: Sequence[Any], call: str = "stream") -> None:
    """Refuse a `call` for several prompts, or for none, by a ValueError that calls one `what`."""
    if len(batch) != 1:
        raise ValueError(
            f"A {call} is of one {what}, got {len(batch)}: {shown(batch)}. Make a {call} of each, "
            "or use generate() or chat()."
        )


def only_prompt(prompt: Any, call: str = "stream") -> Any:
    """The prompt of a `call` that takes one alone; it may come as a list of one.

    Raises:
        ValueError: these are several prompts, or none.
    """
    batch = prompts_of(prompt)
    check_is_one("prompt", batch, call)
    return batch[0]


def is_one_prompt(prompts: Any) -> bool:
    """Whether a call brings one prompt itself, and no list of prompts."""
    if isinstance(prompts, _LISTS):
        return _may_be_ids(prompts) and len(prompts) > 0
    return isinstance(prompts, str | Mapping)


def parts_of(prompt: Any) -> PromptParts:
    """A prompt taken apart.

    Raises:
        ValueError: it is no prompt, or a dict with other keys.
    """
    if isinstance(prompt, str):
        return PromptParts(prompt)
    if isinstance(prompt, Iterator) or (isinstance(prompt, _LISTS) and _may_be_ids(prompt)):
        return PromptParts(None, prompt)
    if not isinstance(prompt, Mapping):
        raise ValueError(f"{_RULE}, got {shown(prompt)}.")
    if unknown := [key for key in prompt if key not in _KEYS]:
        raise ValueError(
            f"A prompt's dict may have the keys {', '.join(map(repr, _KEYS))}, got the key "
            f"{shown(unknown[0])}, which jaxspec does not take. Leave it out."
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(
            f"cache_salt must be a text of at least one character, got {shown(salt)}. Leave it out "
            "if anybody may share the prompt."
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not (isinstance(text, str) or (text is None and ids is not None)):
        raise ValueError(f"{_RULE}, got {shown(prompt)}.")
    return PromptParts(text, ids, salt, _boundaries(prompt.get("cache_boundaries"), ids))


def _boundaries(value: Any, ids: Any) -> tuple[int, ...]:
    """Where a prompt says that others will part from it.

    Raises:
        ValueError: they are no counts of tokens, too many, or there are no tokens to count.
    """
    if value is None:
        return ()
    found = items(value, MAX_BOUNDARIES)
    if ids is None or found is None or not all(is_integer(n) and n > 0 for n in found):
        raise ValueError(
            "cache_boundaries must be a list of numbers of tokens, each above 0, and goes with "
            f"prompt_token_ids, got {shown(value)}. Leave it out with a text."
        )
    if len(found) > MAX_BOUNDARIES:
        raise ValueError(
            f"A prompt may have at most {MAX_BOUNDARIES} cache_boundaries, got more. Leave out "
            "those that are of least use: each costs a step and the memory of a state."
        )
    return tuple(map(int, found))


def boundaries_in(parts: PromptParts, length: int) -> tuple[int, ...]:
    """The `cache_boundaries` of a prompt of which the last `length` tokens are kept.

    Raises:
        ValueError: one lies behind the prompt's end.
    """
    ids, found = parts.token_ids, parts.cache_boundaries
    total = len(ids) if isinstance(ids, Sized) else max(length, *found, 0)
    if beyond := [n for n in found if n > total]:
        raise ValueError(
            f"cache_boundaries must lie in the prompt, which has {total:,} tokens, got "
            f"{shown(beyond[0])}. Count the tokens in front of each."
        )
    return tuple(n - total + length for n in found if n > total - length)


def read_ids(value: Any, most: int, truncated_to: int | None) -> list[int]:
    """Token ids as Python's integers; no more are read than could fit.

    `most`: tokens that a prompt may have. `truncated_to`: how many of the last ids are kept.

    Raises:
        ValueError: they are no integers, or too many.
    """
    limit = most if truncated_to is None else _MAX_READ
    if truncated_to is not None and isinstance(value, _LISTS):
        value = value[-truncated_to:] if getattr(value, "ndim", 1) == 1 else value
    ids = items(value, limit)
    if ids is None or not are_integers(ids):
        raise ValueError(f"prompt_token_ids must be a list of integers, got {shown(value)}.")
    if len(ids) > limit:
        count = len(value) if isinstance(value, Sized) else f"more than {limit}"
        raise ValueError(
            f"A prompt must fit max_model_len={most}, got {count} token ids. Shorten it, set "
            "truncate_prompt_tokens, or raise max_model_len."
        )
    return list(map(int, ids if truncated_to is None else ids[-truncated_to:]))


def _may_be_ids(values: Any) -> bool:
    return getattr(values, "ndim", 1) == 1 and (len(values) == 0 or is_integer(values[0]))

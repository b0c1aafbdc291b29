"""Prompts of a call: text, token ids, or a dict of them as in vLLM; with their validation."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from jaxspec.checks import (
    INT64_MAX,
    PromptTooLongError,
    are_integers,
    integer,
    is_integer,
    items,
    shown,
)
from jaxspec.requests.sampling_params import SamplingParams

MAX_SAMPLES = 2**18
"""Most samples of one call; each takes about 1.4 kB from the start."""
MAX_BOUNDARIES = 16
"""Most `cache_boundaries` of one prompt."""
_MAX_READ = 2**22  # most token ids that are read of a prompt before it is truncated


class TextPrompt(TypedDict):
    """A prompt as text.

    Attributes:
        prompt: The text.
        cache_salt: Isolates cached prefixes: only prompts with the same salt share them, so that
            latency does not reveal the prompts of other users.
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids.

    Attributes:
        prompt_token_ids: The token ids.
        prompt: Text of the prompt, which is only copied to the output.
        cache_salt: See `TextPrompt`.
        cache_boundaries: Prefix lengths, in tokens, at which later prompts will diverge from this
            one or continue it. Models with recurrent states cache a state there if that is worth a
            step. Chats set theirs automatically (docs/prefix-caching.md).
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    cache_boundaries: NotRequired[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt whose token ids are known to be in the model's vocabulary.

    Attributes:
        token_ids: The token ids.
        text: See `TokensPrompt.prompt`.
        cache_salt: See `TextPrompt`.
        cache_boundaries: See `TokensPrompt`.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str | None = None
    cache_boundaries: tuple[int, ...] = ()

    def truncated(self, length: int | None) -> "TokenizedPrompt":
        """Return the last `length` tokens; None means all. Boundaries before them are dropped.

        With 10 ids truncated to the last 6, the boundaries (3, 8) become (4,).
        """
        num_dropped = max(0, len(self.token_ids) - length) if length else 0
        if not num_dropped:
            return self
        ends = tuple(n - num_dropped for n in self.cache_boundaries if n > num_dropped)
        ids = self.token_ids[num_dropped:]
        return dataclasses.replace(self, token_ids=ids, cache_boundaries=ends)


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any] | TokenizedPrompt
_LISTS = (list, tuple, range, np.ndarray)  # types of token-id lists
_KEYS = tuple(TokensPrompt.__annotations__)
_OF_VLLM = ("prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys of vLLM's prompts that may be None."""
_RULE = (
    "A prompt must be a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
)


class PromptParts(NamedTuple):
    """The parts of a prompt; at least one of text and token ids is given."""

    text: str | None
    token_ids: Any = None  # not validated yet
    cache_salt: str | None = None
    cache_boundaries: tuple[int, ...] = ()  # not yet compared with the number of tokens


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts of a call as a list, given one prompt, a collection or an iterator.

    A collection that begins with an integer is one prompt of token ids.

    Raises:
        ValueError: `prompts` has another type, or more than `MAX_SAMPLES` entries.
    """
    if isinstance(prompts, str | Mapping | TokenizedPrompt):
        return [prompts]
    found = items(prompts, MAX_SAMPLES)
    if found is None:
        raise ValueError(
            "prompts must be a text, token ids, a dict with 'prompt' or 'prompt_token_ids', or a "
            f"list of them, got {shown(prompts)}."
        )
    if found and is_integer(found[0]):
        # Prepend the ids already consumed from an iterator.
        return [itertools.chain(found, prompts) if isinstance(prompts, Iterator) else prompts]
    if len(found) > MAX_SAMPLES:
        raise ValueError(
            f"One call may have at most {MAX_SAMPLES:,} prompts, got more. Make several calls."
        )
    return found


def check_num_samples(counts: Iterable[int]) -> None:
    """Raise ValueError if the `counts` of samples per prompt sum to more than `MAX_SAMPLES`."""
    if (count := sum(counts)) > MAX_SAMPLES:
        raise ValueError(
            f"One call may have at most {MAX_SAMPLES:,} samples, got {count:,}. Lower n, or make "
            "several calls."
        )


def check_is_one(what: str, batch: Sequence[Any], call: str = "stream") -> None:
    """Raise ValueError unless `batch` has one entry; `what` and `call` name it in the message."""
    if len(batch) != 1:
        raise ValueError(
            f"A {call} is of one {what}, got {len(batch)}: {shown(batch)}. Make a {call} of each, "
            "or use generate() or chat()."
        )


def only_prompt(prompt: Any, call: str = "stream") -> Any:
    """Return the single prompt of a `call`, given alone or as a list of one.

    Raises:
        ValueError: `prompt` is a list of several prompts, or of none.
    """
    batch = prompts_of(prompt)
    check_is_one("prompt", batch, call)
    return batch[0]


def is_one_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is one prompt rather than a list of prompts."""
    if isinstance(prompts, _LISTS):
        return _may_be_ids(prompts) and len(prompts) > 0
    return isinstance(prompts, str | Mapping)


def parts_of(prompt: Any) -> PromptParts:
    """Split a prompt into its parts.

    Raises:
        ValueError: `prompt` has another type, an unknown key or an invalid value.
    """
    if isinstance(prompt, str):
        return PromptParts(prompt)
    if isinstance(prompt, Iterator) or (isinstance(prompt, _LISTS) and _may_be_ids(prompt)):
        return PromptParts(None, prompt)
    if not isinstance(prompt, Mapping):
        raise ValueError(f"{_RULE}, got {shown(prompt)}.")
    neutral = {key for key in _OF_VLLM if prompt.get(key) is None}
    if unknown := [key for key in prompt if key not in _KEYS and key not in neutral]:
        raise ValueError(
            f"A prompt's dict may have the keys {', '.join(map(repr, _KEYS))}, got the key "
            f"{shown(unknown[0])}, which jaxspec does not take. Leave it out."
        )
    salt = check_salt(prompt.get("cache_salt"))
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not (isinstance(text, str) or (text is None and ids is not None)):
        raise ValueError(f"{_RULE}, got {shown(prompt)}.")
    return PromptParts(text, ids, salt, _boundaries(prompt.get("cache_boundaries"), ids))


def check_salt(salt: Any) -> str | None:
    """Return a `cache_salt`; raise ValueError unless it is None or a text that is not empty."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(
            f"cache_salt must be a text of at least one character, got {shown(salt)}. Leave it out "
            "if any request may share the prompt."
        )
    return salt


def _boundaries(value: Any, ids: Any) -> tuple[int, ...]:
    """Validate `cache_boundaries`.

    Raises:
        ValueError: `value` is not a list of at most `MAX_BOUNDARIES` positive integers, or the
            prompt has no token ids.
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


def boundaries_in(ids: Any, found: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return the `cache_boundaries` `found` of token ids truncated to their last `length`.

    They change as in `TokenizedPrompt.truncated`.

    Raises:
        ValueError: a boundary is greater than the number of token ids.
    """
    total = len(ids) if isinstance(ids, Sized) else max(length, *found, 0)
    if beyond := [n for n in found if n > total]:
        raise ValueError(
            f"cache_boundaries must lie in the prompt, which has {total:,} tokens, got "
            f"{shown(beyond[0])}. Count the tokens in front of each."
        )
    return tuple(n - total + length for n in found if n > total - length)


def read_ids(value: Any, most: int, truncated_to: int | None) -> tuple[int, ...]:
    """Return token ids as Python integers, reading no more than could fit.

    Args:
        value: A list, array or iterator of ids.
        most: Most tokens of a prompt.
        truncated_to: Number of final ids to keep; None disables truncation.

    Raises:
        ValueError: `value` has entries other than integers, or too many.
    """
    limit = most if truncated_to is None else _MAX_READ
    if truncated_to is not None and isinstance(value, _LISTS):
        value = value[-truncated_to:] if getattr(value, "ndim", 1) == 1 else value
    ids = items(value, limit)
    if ids is None or not are_integers(ids):
        raise ValueError(f"prompt_token_ids must be a list of integers, got {shown(value)}.")
    if len(ids) > limit:
        count = len(value) if isinstance(value, Sized) else f"more than {limit}"
        raise PromptTooLongError.of(f"it has {count} token ids", most)
    return tuple(map(int, ids if truncated_to is None else ids[-truncated_to:]))


def _may_be_ids(values: Any) -> bool:
    return getattr(values, "ndim", 1) == 1 and (len(values) == 0 or is_integer(values[0]))


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: SamplingParams | None = None,
) -> list[SamplingParams]:
    """Return copies of the parameters for each of `count` prompts, validated again.

    Args:
        params: Parameters for all prompts, one for each, or None for `default`.
        count: Number of prompts.
        default: Used for None; `SamplingParams()` if it is None too.

    Raises:
        ValueError: a list has another length, or a value assigned after construction is invalid.
    """
    if params is None:
        params = default or SamplingParams()
    if isinstance(params, SamplingParams):
        return [params.clone()] * count
    if not isinstance(params, Sequence) or any(not isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params must be SamplingParams, one or a list of them, got {shown(params)}. "
            "Build them as in SamplingParams(temperature=0.8)."
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one for each, got {len(params)} for "
            f"{count} prompts."
        )
    copies = {id(each): each.clone() for each in params}
    return [copies[id(each)] for each in params]


def names_of(names: Any, count: int) -> list[str]:
    """Validate the request ids of `count` prompts.

    Raises:
        ValueError: `names` is not a list of `count` strings.
    """
    found = items(names, count)
    if found is None or len(found) != count or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"request_ids must be a list of {count} texts, one for each prompt, got {shown(names)}."
        )
    return found


def priorities_of(priority: Any, count: int) -> list[int]:
    """Return the priority of each of `count` prompts.

    Args:
        priority: One integer for all, a list with one per prompt, or None for 0.
        count: Number of prompts.

    Raises:
        ValueError: a priority is not an integer, or the list has another length.
    """
    if priority is None or is_integer(priority):
        priority = [priority or 0] * count
    found = items(priority, count)
    if found is None or len(found) != count:
        raise ValueError(
            f"priority must be an integer, or a list of {count} of them, one for each prompt, got "
            f"{shown(priority)}."
        )
    return [integer("Each of priority", each, -INT64_MAX) for each in found]


@contextlib.contextmanager
def named(name: str, count: int) -> Iterator[None]:
    """Prefix the message of a ValueError raised inside with `name`, if `count` is not 1."""
    try:
        yield
    except ValueError as error:
        if count == 1:
            raise
        kind = PromptTooLongError if isinstance(error, PromptTooLongError) else ValueError
        raise kind(f"In {name} of {count}: {error}") from error

"""What a call gives for each of its prompts, and which one an error is about."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.checks import INT64_MAX, integer, is_integer, items, shown
from jaxspec.sampling_params import SamplingParams


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: SamplingParams | None = None,
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts: copies, checked as they are now; None is `default`.

    Raises:
        ValueError: a list of another length, or a value that was assigned breaks a rule.
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


def for_one(
    params: SamplingParams | None, default: SamplingParams, name: str | None, priority: int
) -> tuple[list[SamplingParams], list[str] | None, int]:
    """Parameters, names and priority of a call for one prompt, as calls for several take them.

    Raises:
        ValueError: as `params_of`, or the priority is no integer that fits in 64 bits.
    """
    names = None if name is None else [name]
    return params_of(params, 1, default), names, integer("priority", priority, -INT64_MAX)


def names_of(names: Any, count: int) -> list[str]:
    """What each of `count` prompts is called.

    Raises:
        ValueError: they are no texts, or not as many.
    """
    found = items(names, count)
    if found is None or len(found) != count or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"request_ids must be a list of {count} texts, one for each prompt, got {shown(names)}."
        )
    return found


def priorities_of(priority: Any, count: int) -> list[int]:
    """The priority of each of `count` prompts: one for all, or one each; None: 0.

    Raises:
        ValueError: they are no integers, or not as many.
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
    """An error inside says which of `count` it is about, if there are several."""
    try:
        yield
    except ValueError as error:
        if count == 1:
            raise
        raise ValueError(f"In {name} of {count}: {error}") from error

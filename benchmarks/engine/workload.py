"""Lengths, ids and arrivals of requests. It needs NumPy alone, so that other engines can use it.

Lengths have names: "trace" is 256 requests of unequal lengths (`trace_lengths.json`, in order of
arrival), "8192x1024" prompt tokens and new tokens of each request. Ids are random.
"""

import json
from pathlib import Path

import numpy as np

TRACE = Path(__file__).with_name("trace_lengths.json")


def lengths(name: str, count: int | None = None) -> list[tuple[int, int]]:
    """Return the prompt tokens and new tokens of `count` requests; None: the whole trace, or one.

    Raises:
        ValueError: `name` has another form, or the trace is shorter.
    """
    if name == "trace":
        known = [(prompt, tokens) for prompt, tokens in json.loads(TRACE.read_text())["lengths"]]
    else:
        prompt, _, tokens = name.partition("x")
        if not (prompt.isdecimal() and tokens.isdecimal() and int(prompt) and int(tokens)):
            raise ValueError(f'Lengths are "trace" or as "8192x1024", got {name!r}.')
        known = [(int(prompt), int(tokens))] * (count or 1)
    if count is not None and count > len(known):
        raise ValueError(f"The trace has {len(known)} requests, and {count} were asked for.")
    return known[:count]


def prompts(requests: list[tuple[int, int]], vocab: int) -> list[list[int]]:
    """Return random ids for each request, the same in each call."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, prompt).tolist() for prompt, _ in requests]


def poisson(count: int, per_second: float) -> list[float]:
    """Return arrival times (seconds) of `count` requests, a Poisson process; the first is 0."""
    between = np.random.default_rng(1).exponential(1 / per_second, count)
    between[0] = 0
    return np.cumsum(between).tolist()

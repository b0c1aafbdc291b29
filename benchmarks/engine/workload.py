"""Requests as users send them: their lengths, ids and arrivals. NumPy alone, for every engine.

Lengths are named. "trace" is 256 requests of unequal lengths (`trace_lengths.json`, in order of
arrival), and "8192x1024" so many prompt tokens and so many new ones for each request. Ids are
random, and drafts accept as many of them as the benchmark says.
"""

import json
from pathlib import Path

import numpy as np

TRACE = Path(__file__).with_name("trace_lengths.json")


def lengths(name: str, count: int | None = None) -> list[tuple[int, int]]:
    """The first `count` requests as (prompt tokens, new tokens); None: the trace, or one.

    Raises:
        ValueError: `name` is no lengths, or the trace is shorter.
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
    """Random ids for each request, the same each time."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, prompt).tolist() for prompt, _ in requests]


def poisson(count: int, per_second: float) -> list[float]:
    """Seconds at which `count` requests arrive, independently of each other; the first at once."""
    between = np.random.default_rng(1).exponential(1 / per_second, count)
    between[0] = 0
    return np.cumsum(between).tolist()

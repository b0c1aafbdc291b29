"""HostDrafter: drafts that are thought of on the host, which knows tokens some dispatches late.

It says how a request will go on after the tokens that it knows. The device finds out how much of
that has come since, and drafts what is left:

        known to the host    a b c
        its path                   d e f g h i
        since emitted              d e f            drafts of 2: g h
        since emitted              d x              no drafts: it went another way
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config import MAX_PATH, StepShapes
from jaxspec.plan import Program, plan_layout
from jaxspec.request import Request
from jaxspec.speculation import SpeculativeConfig

# `SpeculativeConfig.method` -> module:class, which has a `from_config(config)`. Other methods draft
# on the device alone.
HOST_DRAFTERS = {"suffix": "jaxspec.scheduler.suffix_drafter:SuffixDrafter"}


class Path(NamedTuple):
    """What is expected behind the tokens of a request."""

    tokens: Sequence[int] = ()
    match: int = 0  # tokens that led to it: the more they are, the likelier it is


class HostDrafter:
    """Follows requests, on the hot path. This one expects nothing; others derive from it.

    It may draft, or only look on: each method is a moment in a request's life.
    """

    def add(self, request: Request) -> None:
        """A request runs; it may have run before and been preempted."""

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """A request that runs got `tokens`."""

    def leave(self, request: Request) -> None:
        """A request that ran is about to give its slot and pages back: it ended, or is preempted.

        Until this returns they are its own: a plan that gives them away comes later. Steps in
        flight may still bring tokens of a request that is preempted, and end it.
        """

    def remove(self, request: Request) -> None:
        """A request has ended; perhaps it never ran."""

    def settle(self, request: Request) -> None:
        """A request that has ended was read by its caller: no stop string cuts it any more."""

    def clear(self) -> None:
        """Forget all, whatever an interrupt has left."""

    def close(self) -> None:
        """Nothing comes any more: finish what goes on beside the engine."""

    def figures(self) -> dict[str, Any]:
        """What it adds to `LLM.metrics`."""
        return {}

    def path(self, request: Request, length: int) -> Path:
        """How a request that runs goes on behind `request.tokens`, `length` tokens at most."""
        return Path()


def make_host_drafter(config: SpeculativeConfig | None) -> HostDrafter:
    """The host's part of `config.method`."""
    if config is None or config.method not in HOST_DRAFTERS:
        return HostDrafter()
    module, name = HOST_DRAFTERS[config.method].split(":")
    return getattr(importlib.import_module(module), name).from_config(config)


def path_length(config: SpeculativeConfig | None, max_in_flight: int, num_steps: int) -> int:
    """Tokens of a plan's paths: what a dispatch and those in flight may emit, and drafts behind it.

    `num_steps`: the most that a dispatch makes. 0: the method needs no paths.
    """
    if config is None or config.method not in HOST_DRAFTERS:
        return 0
    width = 1 + config.num_drafts
    return min(MAX_PATH, (max_in_flight + 1) * num_steps * width + config.num_drafts)


def path_fields(
    drafter: HostDrafter, requests: Sequence[Request], shapes: StepShapes, program: Program
) -> dict[str, Any]:
    """The fields of a plan that hold the paths of its first rows; none in engines without paths."""
    if "paths" not in plan_layout(program, shapes).fields:
        return {}
    found = [drafter.path(request, shapes.path_length) for request in requests]
    paths = np.full((len(found), shapes.path_length), -1, np.int32)
    for row, path in zip(paths, found, strict=True):
        row[: len(path.tokens)] = path.tokens
    return {
        "paths": paths,
        "path_from": [len(request.tokens) for request in requests],
        "path_match": [path.match for path in found],
    }

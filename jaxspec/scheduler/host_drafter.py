"""HostDrafter: drafts made on the host, which receives tokens some dispatches late.

It predicts a path: the continuation of a request after the tokens that the host has. The device
compares the path with the tokens emitted since, and drafts the rest of it:

        tokens on the host   a b c
        path                       d e f g h i
        emitted since              d e f            2 drafts: g h
        emitted since              d x              no drafts: the path was wrong
"""

import abc
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.options import SpeculativeConfig
from jaxspec.plan.plan import PlacesRows, plan_layout
from jaxspec.plan.step_shapes import MAX_PATH, StepShapes
from jaxspec.requests.request import Request
from jaxspec.scheduler.request_observer import RequestObserver

# `SpeculativeConfig.method` -> module:class with a `from_config(config)`. Methods that are not
# listed draft on the device alone.
HOST_DRAFTERS = {"suffix": "jaxspec.scheduler.suffix_index:SuffixDrafter"}


class Path(NamedTuple):
    """Expected continuation of a request."""

    tokens: Sequence[int] = ()
    match: int = 0  # number of matching tokens before it; a longer match is more reliable


class HostDrafter(RequestObserver, abc.ABC):
    """Predicts on the host how running requests continue."""

    @abc.abstractmethod
    def path(self, request: Request, length: int) -> Path:
        """Return the expected continuation of `request.tokens`, at most `length` tokens."""


def make_host_drafter(config: SpeculativeConfig | None) -> HostDrafter | None:
    """Create the host's part of `config.method`; None for methods that draft on the device."""
    if config is None or config.method not in HOST_DRAFTERS:
        return None
    module, name = HOST_DRAFTERS[config.method].split(":")
    return getattr(importlib.import_module(module), name).from_config(config)


def path_length(config: SpeculativeConfig | None, max_in_flight: int, num_steps: int) -> int:
    """Return the tokens per path: those that dispatches in flight may emit, then drafts.

    `num_steps` is the largest number of steps per dispatch. 0 means the method has no paths.
    """
    if config is None or config.method not in HOST_DRAFTERS:
        return 0
    width = 1 + config.num_drafts
    return min(MAX_PATH, (max_in_flight + 1) * num_steps * width + config.num_drafts)


def path_fields(
    drafter: HostDrafter | None,
    requests: Sequence[Request],
    shapes: StepShapes,
    program: PlacesRows,
) -> dict[str, Any]:
    """Return the plan fields with the paths of its first rows; empty in engines without paths."""
    if drafter is None or "paths" not in plan_layout(program, shapes).fields:
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

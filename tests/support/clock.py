"""A clock of a test's own, for one module."""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def set_clock(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., Any]
) -> None:
    """Replace functions of `time` where `module` calls them.

    Other modules keep theirs: event loops of servers in other threads would end by another clock.
    """
    monkeypatch.setattr(module, "time", SimpleNamespace(**(vars(time) | functions)))

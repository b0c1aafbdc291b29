"""Experts of tokens, recorded while layers are traced, or replayed in place of the best ones."""

import contextlib
import contextvars
from collections.abc import Iterator

from jaxtyping import Array, Int

Experts = Int[Array, "tokens chosen"]

_recorded = contextvars.ContextVar[list[Experts] | None]("recorded", default=None)
_replayed = contextvars.ContextVar[Experts | None]("replayed", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Experts]]:
    """Collect the experts of each routing op traced inside the context, in order, best first.

    The experts of padding are undefined.
    """
    found: list[Experts] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def replayed(experts: Experts | None) -> Iterator[None]:
    """Route the tokens of ops traced inside the context to `experts`; None replays nothing."""
    token = _replayed.set(experts)
    try:
        yield
    finally:
        _replayed.reset(token)


def replayed_here() -> Experts | None:
    return _replayed.get()


def record(experts: Int[Array, "tokens parts"], chosen: int) -> None:
    """Record the first `chosen` of each token's experts; those after them are shared."""
    if (found := _recorded.get()) is not None:
        found.append(experts[:, :chosen])

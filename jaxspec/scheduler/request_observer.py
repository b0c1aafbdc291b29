"""RequestObserver: receives the events of requests in the scheduler."""

from collections.abc import Sequence
from typing import Any

from jaxspec.requests.request import Request


class RequestObserver:
    """Observes the life of each request in the scheduler; subclasses override the events they need.

    The methods are called on the hot path. Here they do nothing.
    """

    def add(self, request: Request) -> None:
        """Called when a request enters the batch, possibly again after a preemption."""

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """Called when a running request has emitted `tokens`."""

    def leave(self, request: Request) -> None:
        """Called before a request releases its slot and pages, at its end or for a preemption.

        Until this returns, no plan assigns its pages to another request. Steps in flight may still
        emit tokens of a preempted request, and end it.
        """

    def remove(self, request: Request) -> None:
        """Called when a request has ended, possibly before it ever ran."""

    def settle(self, request: Request) -> None:
        """Called when an ended request was read: no stop string cuts it any more."""

    def clear(self) -> None:
        """Drop all requests; an interrupt may have left any state."""

    def close(self) -> None:
        """Finish all work beside the engine; no event follows."""

    def stats(self) -> dict[str, Any]:
        """Return entries for `LLM.metrics`."""
        return {}

"""Copies of pages on the host, without waiting for the device: of any pool, and routed experts."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxspec.cache import RoutedExperts
from jaxspec.engine.metrics import HOST_BYTES
from jaxspec.requests.request import Request, RoutedTokens
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.scheduler.request_observer import RequestObserver

_TOKENS = 256  # tokens per copy: one program for all lengths, and little device memory

Pages = Shaped[Array, "pages page_size ..."]


class PageReader:
    """Reader of one pool of a runner, an array whose first axis is pages.

    A copy is enqueued after the steps already dispatched and before later ones. It holds what those
    steps wrote, even if the pages are reused afterwards. `read` does not wait for the device.
    """

    def __init__(self, runner: ModelRunner, pool: str):
        """Compile the copy, and run it once, which loads it on a GPU."""
        self._runner, self._pool = runner, pool
        self.page_size = runner.shapes.page_size
        self._num_pages = max(1, _TOKENS // self.page_size)
        pages = np.zeros(self._num_pages, np.int32)
        copy = runner.group.on_each(_copy, whole=1, equal=True)
        self._copy: Any = jax.jit(copy).lower(runner.state.pools[pool], pages).compile()
        self.read([0])

    def read(self, pages: Sequence[int]) -> list[Pages]:
        """Return copies of `pages`, in order; the last copy is padded with the null page."""
        pool, size = self._runner.state.pools[self._pool], self._num_pages
        copies = []
        for first in range(0, len(pages), size):
            some = np.zeros(size, np.int32)
            some[: len(pages) - first] = pages[first : first + size]
            copies.append(self._copy(pool, some))
        return copies


class RouteRecorder(RequestObserver):
    """Set `Request.routes` when a request leaves its row, after the steps in flight.

    A preempted request may end while it waits, by tokens of steps in flight or by an abort, or
    while its tokens are computed again: it then has those of its earlier entry, which cover all its
    tokens, because it emits none until it is computed.
    """

    def __init__(self, runner: ModelRunner):
        """Compile the copy of pages."""
        self._reader = PageReader(runner, RoutedExperts.name)
        # Not a WeakSet, which another thread's `add` would change while `stats` iterates over it.
        self._copied = set[weakref.ref[RoutedTokens]]()

    def leave(self, request: Request) -> None:
        """Enqueue copies of the request's pages."""
        if request.is_prefilling:
            return  # not all its tokens are computed
        size = self._reader.page_size
        length = len(request.tokens) if request.finish else request.tokens_bound
        num_routes = max(1, length - 1)  # at least one page, which has the shape of the experts
        first = min(request.first_route, num_routes - 1) // size
        pages = request.pages[first : -(-num_routes // size)]
        request.routes = RoutedTokens(self._reader.read(pages), first * size)
        self._copied.add(weakref.ref(request.routes, self._copied.discard))

    def stats(self) -> dict[str, int]:
        """Return the bytes of copies on the host, until their requests are dropped.

        Any thread may call it.
        """
        copied = (each() for each in list(self._copied))
        return {HOST_BYTES: sum(routes.num_bytes for routes in copied if routes is not None)}


def _copy(pool: Pages, pages: Int[Array, " pages"]) -> Pages:
    # Into pinned host memory, like a step's output: the device then holds only one copy at a time,
    # regardless of the request's length.
    return jax.device_put(pool[pages], jax.memory.Space.Host)

"""PagePool: reference-counted allocation of KV pages; PrefixMetrics: counts of the prefix cache.

A page is held while its reference count is above 0. A page that no request holds is free, or cached
in a `Reserve`, which evicts it when free pages run short.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from jaxspec.plan.step_shapes import StepShapes


class Reserve(Protocol):
    """Cache of pages that no request holds."""

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can free."""
        ...

    def holds(self, page: int) -> bool:
        """Return whether the page is cached, held or not."""
        ...

    def pin(self, page: int) -> None:
        """Record that a cached page is held again."""
        ...

    def unpin(self, page: int) -> None:
        """Record that a cached page is no longer held."""
        ...

    def evict(self) -> list[int]:
        """Evict one or more pages; return those that the pool must free."""
        ...


class NoReserve:
    """Reserve without pages."""

    num_evictable = 0

    def holds(self, page: int) -> bool:
        return False

    def pin(self, page: int) -> None: ...

    def unpin(self, page: int) -> None: ...

    def evict(self) -> list[int]:
        return []


class PagePool:
    """Reference counts of pages `1..num_pages - 1`; page 0 is the null page."""

    def __init__(self, num_pages: int, reserve: Reserve | None = None):
        """Start with every page free; `reserve` may cache released pages."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._reserve = NoReserve() if reserve is None else reserve

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated: free and evictable ones."""
        return len(self._free) + self._reserve.num_evictable

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages: free ones first, then evicted ones.

        Raises:
            ValueError: fewer pages are free or evictable.
        """
        if count > self.num_free:
            raise ValueError(f"{count} pages asked for, {self.num_free} are free.")
        while len(self._free) < count:
            self.add_free(self._reserve.evict())
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which must be held or cached."""
        for page in pages:
            if not self._references[page]:
                if not self._reserve.holds(page):
                    raise ValueError(f"Page {page} is free: only a held page can be shared.")
                self._reserve.pin(page)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`.

        A page without references stays in the reserve if it is cached there. Otherwise it is free
        at once, because plans that reuse it run later.
        """
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"Page {page} is released more often than it was taken.")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._reserve.holds(page):
                self._reserve.unpin(page)
            else:
                self._free.append(page)

    def add_free(self, pages: Iterable[int]) -> None:
        """Free those of `pages`, which left the reserve, that are not held."""
        self._free += [page for page in pages if not self._references[page]]


def check_fits(num_tokens: int, shapes: StepShapes) -> None:
    """Check that a request of `num_tokens` tokens fits into the pool when it runs alone.

    Raises:
        ValueError: it does not fit.
    """
    needed, there = shapes.pages_for(num_tokens), shapes.num_pages - 1
    if needed > there:
        raise ValueError(
            f"A request must fit the page pool alone: {num_tokens} tokens need {needed} pages of "
            f"{shapes.page_size}, the pool has {there}. Raise num_pages or lower max_tokens."
        )


@dataclasses.dataclass
class PrefixMetrics:
    """Counts over the life of an engine; tokens count on the first entry of a request."""

    num_queries: int = 0  # tokens looked up
    num_hits: int = 0  # tokens found in the cache
    num_without_state: int = 0  # tokens with cached pages but no cached state at their end
    num_resumed: int = 0  # tokens found by preempted requests when they entered again
    num_checkpoints: int = 0  # states cached
    num_evicted_checkpoints: int = 0
    num_evicted_pages: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason

    def of_request(self, num_tokens: int, num_cached: int, num_matched: int) -> None:
        """Count a request on its first entry into the batch."""
        self.num_queries += num_tokens
        self.num_hits += num_cached
        self.num_without_state += max(0, num_matched - num_cached)

    def told(self) -> dict[str, Any]:
        """Return all counts by name."""
        return {**vars(self), "skipped": dict(self.skipped)}

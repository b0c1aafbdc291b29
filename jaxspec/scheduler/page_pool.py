"""PagePool: gives out, shares and takes back KV-cache pages."""

from collections.abc import Iterable
from typing import Protocol

from jaxspec.config import StepShapes


class Reserve(Protocol):
    """Who keeps pages that nobody holds, and gives them up when they are needed."""

    @property
    def num_evictable(self) -> int:
        """Pages that it can give up."""
        ...

    def holds(self, page: int) -> bool:
        """Whether it keeps the page, or would if nobody held it."""
        ...

    def pin(self, page: int) -> None:
        """A page that it keeps is held again."""
        ...

    def unpin(self, page: int) -> None:
        """Nobody holds a page any more: it keeps it."""
        ...

    def evict(self) -> list[int]:
        """Give up a page or some, which are free then."""
        ...


class NoReserve:
    """Keeps nothing: a page that nobody holds is free."""

    num_evictable = 0

    def holds(self, page: int) -> bool:
        """No."""
        return False

    def pin(self, page: int) -> None:
        """Nothing is kept."""

    def unpin(self, page: int) -> None:
        """Nothing is kept."""

    def evict(self) -> list[int]:
        """Nothing is kept."""
        return []


class PagePool:
    """Counted references to pages `1..num_pages - 1`; page 0 is the null page."""

    def __init__(self, num_pages: int, reserve: Reserve | None = None):
        """Start with every page free; `reserve` may keep those that are released."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._reserve = NoReserve() if reserve is None else reserve

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free) + self._reserve.num_evictable

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages that nobody holds: free ones first, then such as the reserve keeps.

        Raises:
            ValueError: there are fewer.
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
        """Hold `pages` once more; each must be held already, or kept by the reserve."""
        for page in pages:
            if not self._references[page]:
                if not self._reserve.holds(page):
                    raise ValueError(f"Page {page} is free: only a held page can be shared.")
                self._reserve.pin(page)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Let go of `pages`; one that nobody holds is free at once, for later plans run later.

        Unless the reserve keeps it.
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
        """The reserve has forgotten `pages`: those that nobody holds are free."""
        self._free += [page for page in pages if not self._references[page]]


def check_fits(num_tokens: int, shapes: StepShapes) -> None:
    """Refuse a request of so many tokens that would not fit the pool even alone.

    Raises:
        ValueError: it would not.
    """
    needed, there = shapes.pages_for(num_tokens), shapes.num_pages - 1
    if needed > there:
        raise ValueError(
            f"A request must fit the page pool alone: {num_tokens} tokens need {needed} pages of "
            f"{shapes.page_size}, the pool has {there}. Raise num_pages or lower max_tokens."
        )

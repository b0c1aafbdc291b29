"""PagePool: gives out, shares and takes back KV-cache pages."""

from collections.abc import Iterable

from jaxspec.config import StepShapes


class PagePool:
    """Counted references to pages `1..num_pages - 1`; page 0 is the null page."""

    def __init__(self, num_pages: int):
        """Start with every page free."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} are free.")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold `pages` once more; each must be held already."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"Page {page} is free: only a held page can be shared.")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Let go of `pages`; a page nobody holds is free at once, for later plans run later."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"Page {page} is released more often than it was taken.")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)


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

"""PagePool: reference-counted allocation of KV pages."""

from collections.abc import Callable, Iterable

from jaxspec.plan.step_shapes import StepShapes
from jaxspec.prefix.tree import PrefixTree


class PagePool:
    """Reference counts of pages `1..num_pages - 1`; page 0 is the null page.

    A page is held while its count is above 0. A page that no request holds is free, or stays in
    `tree` until it is evicted because free pages run short.
    """

    def __init__(self, num_pages: int, tree: PrefixTree, evict: Callable[[], list[int]]):
        """Start with every page free.

        `evict` removes one or more pages from `tree`, or releases `num_droppable` ones, and returns
        the pages that the pool must free.
        """
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._tree, self._evict = tree, evict
        self.num_droppable = 0  # held pages that `evict` can release

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated: free and evictable ones."""
        return len(self._free) + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can free."""
        return self._tree.num_evictable + self.num_droppable

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages: free ones first, then evicted ones.

        Raises:
            ValueError: fewer pages are free or evictable.
        """
        if count > self.num_free:
            raise ValueError(f"{count} pages asked for, {self.num_free} are free.")
        while len(self._free) < count:
            self.add_free(self._evict())
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which must be held or cached."""
        for page in pages:
            if not self._references[page]:
                if not self._tree.holds(page):
                    raise ValueError(f"Page {page} is free: only a held page can be shared.")
                self._tree.pin(page)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`.

        A page without references stays in the tree if it is cached there. Otherwise it is free at
        once, because plans that reuse it run later.
        """
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"Page {page} is released more often than it was taken.")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._tree.holds(page):
                self._tree.unpin(page)
            else:
                self._free.append(page)

    def add_free(self, pages: Iterable[int]) -> None:
        """Free those of `pages`, which left the tree, that are not held."""
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

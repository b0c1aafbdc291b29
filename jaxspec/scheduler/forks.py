"""Forked samples: they start on copies of their parent's state where its prefill stops."""

from collections.abc import Iterable

from jaxspec.plan.plan import SlotCopy
from jaxspec.prefix.page_pool import PagePool
from jaxspec.requests.request import PageTable, Request


class ForkedSamples:
    """Samples that wait for their parent, the first sample of their prompt.

    The prefill of a parent stops before the last prompt token. There its forked samples enter the
    batch, then each sample computes that token itself and draws its own next token. A sample whose
    parent has left, or without a free row or page at the fork, runs its own prefill.

    A request that `is_prefill_only` also stops there, and leaves: another engine continues it.
    """

    def __init__(self) -> None:
        self._of: dict[Request, list[Request]] = {}  # waiting samples by parent, in arrival order
        self._alone: set[Request] = set()  # prefill-only requests

    def __bool__(self) -> bool:
        """True if any sample waits for its parent."""
        return bool(self._of)

    def add(self, request: Request) -> None:
        """Let a queued sample wait for its parent, if they share prompt tokens."""
        if request.is_prefill_only:
            self._alone.add(request)
        elif request.parent is not None and len(request.prompt) > 1:
            self._of.setdefault(request.parent, []).append(request)

    def of(self, parent: Request) -> list[Request]:
        """Return the samples that wait for `parent`."""
        return self._of.get(parent, [])

    def waits(self, request: Request, running: Iterable[Request]) -> bool:
        """Return whether `request` waits for a parent that is running."""
        parent = request.parent
        return parent is not None and request in self.of(parent) and parent in running

    def release(self, request: Request) -> None:
        """Let one sample stop waiting."""
        if request.parent is not None and request in self.of(request.parent):
            self.of(request.parent).remove(request)

    def dismiss(self, parent: Request) -> None:
        """Let all samples of `parent` stop waiting."""
        self._of.pop(parent, None)

    def remove(self, request: Request) -> None:
        """Remove an ended request, both as a waiting sample and as a parent."""
        self.dismiss(request)
        self.release(request)
        self._alone.discard(request)

    def prefill_end(self, request: Request) -> int:
        """Return the tokens to prefill: one less for parents and prefill-only requests."""
        leads = self.of(request) and request.prefill_len == len(request.prompt)
        return request.prefill_len - bool(leads or request.is_prefill_only)

    def ready(self, running: Iterable[Request]) -> list[Request]:
        """Return the parents that have reached the fork and have waiting samples."""
        return [r for r in running if self.of(r) and r.num_computed == len(r.prompt) - 1]

    def prefilled(self) -> list[Request]:
        """Return the prefill-only requests in the batch that are prefilled."""
        return [r for r in self._alone if r.slot and r.num_computed == r.prefill_len - 1]


def num_own_pages(parent: Request, page_size: int) -> int:
    """Return the pages that a fork needs besides shared ones: 1 for a partly filled one, else 0."""
    return int((len(parent.prompt) - 1) % page_size > 0)


def fork(parent: Request, child: Request, pages: PagePool, page_size: int) -> SlotCopy:
    """Allocate the pages of `child`, which has a slot, and return the copies for the device.

    Full pages are shared, because they are never written again; a partly filled page is copied.
    """
    shared = (len(parent.prompt) - 1) // page_size
    pages.share(parent.pages[:shared])
    own = pages.allocate(num_own_pages(parent, page_size))
    child.pages = PageTable(parent.pages[:shared] + own, is_sent=True)
    source, target = (parent.pages[shared], own[0]) if own else (0, 0)
    return SlotCopy(parent.slot, child.slot, source, target, tuple(child.pages))

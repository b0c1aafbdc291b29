"""Forks: samples of one prompt that start where their leader's prefill ends, on copies of it."""

from collections.abc import Iterable

from jaxspec.plan import Fork
from jaxspec.request import Request
from jaxspec.scheduler.page_pool import PagePool


class Followers:
    """Samples that wait for their leader, the first sample of their prompt.

    A leader's prefill stops before the prompt's last token. There its followers enter the batch,
    and then each sample computes that token for itself and draws its own next one. A follower whose
    leader left, or that found no row or page at the fork, runs a prefill of its own.

    The follower of a request that `is_prefill_only` is in another engine. So such a request stops
    there too, and then leaves.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._of: dict[Request, list[Request]] = {}  # by leader, in the order they came
        self._alone: set[Request] = set()  # those that are only to be prefilled

    def __bool__(self) -> bool:
        """Whether any sample waits for a leader."""
        return bool(self._of)

    def add(self, request: Request) -> None:
        """Let a queued sample wait for its leader, if there is a prompt to share."""
        if request.is_prefill_only:
            self._alone.add(request)
        elif request.leader is not None and len(request.prompt) > 1:
            self._of.setdefault(request.leader, []).append(request)

    def of(self, leader: Request) -> list[Request]:
        """The samples that wait for `leader`."""
        return self._of.get(leader, [])

    def waits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether `request` still waits for a leader, which must be running."""
        leader = request.leader
        return leader is not None and request in self.of(leader) and leader in running

    def release(self, request: Request) -> None:
        """Let one sample go: it waits no longer."""
        if request.leader is not None and request in self.of(request.leader):
            self.of(request.leader).remove(request)

    def dismiss(self, leader: Request) -> None:
        """Let all go that wait for `leader`."""
        self._of.pop(leader, None)

    def remove(self, request: Request) -> None:
        """A request has ended: it waits no longer, and nobody waits for it."""
        self.dismiss(request)
        self.release(request)
        self._alone.discard(request)

    def prefill_end(self, request: Request) -> int:
        """The tokens that a request's prefill computes: a leader's stops where others fork off."""
        leads = self.of(request) and request.prefill_len == len(request.prompt)
        return request.prefill_len - bool(leads or request.is_prefill_only)

    def ready(self, running: Iterable[Request]) -> list[Request]:
        """The leaders that stand before their last prompt token and are waited for."""
        return [r for r in running if self.of(r) and r.num_computed == len(r.prompt) - 1]

    def prefilled(self) -> list[Request]:
        """Those in the batch that are only to be prefilled, and now are."""
        return [r for r in self._alone if r.slot and r.num_computed == r.prefill_len - 1]


def num_own_pages(leader: Request, page_size: int) -> int:
    """Pages that a fork needs besides those it shares: 1 for a partly filled one, else 0."""
    return int((len(leader.prompt) - 1) % page_size > 0)


def fork(leader: Request, child: Request, pages: PagePool, page_size: int) -> Fork:
    """Give `child`, which has a slot, its pages; returns what the device copies for it.

    Full pages are shared, since nobody writes them again; a partly filled one is copied.
    """
    shared = (len(leader.prompt) - 1) // page_size
    pages.share(leader.pages[:shared])
    own = pages.allocate(num_own_pages(leader, page_size))
    child.pages = leader.pages[:shared] + own
    source, target = (leader.pages[shared], own[0]) if own else (0, 0)
    return Fork(leader.slot, child.slot, source, target, tuple(child.pages))

"""PrefixCache: what of a request is kept for those to come, and what one that enters finds.

Pages of a text are published as soon as nobody writes them any more: those of a prompt when their
chunk is dispatched, since later plans run later, and those of an output when all their tokens are
known to stand. A model with recurrent states can go on only where a state was kept as well. Such a
checkpoint is made between steps by a plan of its own (`plan.EXPORT`):

    mode    checkpoints
    pages   none, for a model without states
    align   at multiples of `checkpoint_interval` in prompts, and nowhere else
    all     where a prompt parts from one that came before, where those to come will part from it,
            before the last token of a long prompt, at the end of an output, of what is preempted,
            and at an interval if there is one

What the device has no room for goes to the host's memory, if that keeps some (`HostTier`). It comes
back for requests that wait (`PrefixArrivals`).
"""

from typing import Any, NamedTuple

from jaxspec.config import StepShapes
from jaxspec.plan import Fork
from jaxspec.request import Finish, Request
from jaxspec.sampler import PENALTIES
from jaxspec.scheduler.host_tier import HostTier
from jaxspec.scheduler.page_pool import PagePool
from jaxspec.scheduler.prefix_arrivals import PrefixArrivals
from jaxspec.scheduler.prefix_figures import PrefixFigures
from jaxspec.scheduler.prefix_store import Copy, PrefixStore
from jaxspec.scheduler.prefix_tree import Node

MIN_UNCACHED = 1000  # tokens of a prompt below which a checkpoint at its end is worth no step
# Tokens that a turn of a chat must add for a checkpoint where the next turn will part from it. A
# step of Qwen3.5-9B takes as long as some 200: benchmarks/results, prefill_h200 and decode_h200.
MIN_TURN = 250


class Hit(NamedTuple):
    """Where a request enters: on pages that it shares, and behind a state that was kept."""

    num_cached: int = 0  # tokens that need not be computed
    pages: tuple[int, ...] = ()  # full ones of these tokens
    tail_page: int = 0  # holds the rest of them, and is to be copied; 0: there is no rest
    checkpoint: int = 0  # slot of the state behind them; 0: the model keeps none
    node: Node | None = None  # of the last token
    num_matched: int = 0  # tokens whose pages are there, or on the host


class PrefixCache:
    """Follows the requests that run; `StepShapes.prefix_caching` says what it keeps of them."""

    def __init__(
        self,
        shapes: StepShapes,
        tier: HostTier | None = None,
        min_uncached: int = MIN_UNCACHED,
        min_turn: int = MIN_TURN,
    ):
        """Start empty; `tier`: the host's part; the others: see `MIN_UNCACHED` and `MIN_TURN`."""
        self.shapes, self.min_uncached, self.min_turn = shapes, min_uncached, min_turn
        self.stats = PrefixFigures()
        self._is_on = shapes.prefix_caching != "off"
        self._has_states = shapes.num_checkpoints > 0
        self._keeps_ends = self._has_states and shapes.prefix_caching == "all"
        self.tier = tier if self._is_on else None
        self.new_pool()

    def new_pool(self) -> PagePool:
        """Forget everything; a pool whose pages are all free."""
        self.store = PrefixStore(self.shapes, self.stats, self.tier)
        self._arrivals = None
        if self.tier is not None:
            self._arrivals = PrefixArrivals(self.store, self.tier)
        self._forget()
        return self.store.pool

    def clear(self) -> None:
        """Forget what is kept. Requests that run lose nothing, and nothing of them is kept."""
        self.store.clear()
        if self.tier is not None and self.tier.disk is not None:
            self.tier.disk.clear()
        self._forget()

    def _forget(self) -> None:
        self._at: dict[Request, Node] = {}  # the last page of each running request in the tree
        self._stops: dict[Request, tuple[int, ...]] = {}  # where its prompt's chunks shall end
        self._found: tuple[Any, Hit] = (None, Hit())
        if self.tier is not None and self._arrivals is not None:
            self.tier.clear()
            self._arrivals.clear()

    def close(self) -> None:
        """Nothing is asked for any more; what is on its way to files is written."""
        if self.tier is not None:
            self.tier.close()

    def figures(self) -> dict[str, Any]:
        """The counts, for people; nothing where no prefix is kept."""
        if not self._is_on:
            return {}
        now: dict[str, Any] = {"num_pages": len(self.store), "num_states": len(self.store.slots)}
        now |= {"host": self.tier.figures()} if self.tier is not None else {}
        return {"prefix_cache": {**self.stats.told(), **now}}

    # What a request finds.

    def expect(self, request: Request) -> None:
        """A request is the next to enter; see `PrefixArrivals.expect`."""
        if self._arrivals is not None and not self.why_not(request):
            self._arrivals.expect(request)

    def is_coming(self, request: Request, num_pages: int, *, can_wait: bool) -> bool:
        """Whether a request waits for its prefix; see `PrefixArrivals.is_coming`."""
        if self._arrivals is None or self.why_not(request):
            return False
        return self._arrivals.is_coming(request, num_pages, can_wait=can_wait)

    def find(self, request: Request) -> Hit:
        """Where a request that waits would enter now; at least its last token is left to compute.

        Nothing is taken yet: the caller holds the pages, and then tells `enter`.
        """
        if not self._is_on or self.why_not(request):
            return Hit()
        tree, limit = self.store.tree, len(request.tokens) - 1
        key = request, limit, tree.version
        if self._found[0] == key:
            return self._found[1]
        size, num_matched = self.shapes.page_size, 0
        if self._arrivals is not None:
            match, num_matched = self._arrivals.match(request), self._arrivals.num_matched(request)
        else:
            match = tree.match(request.cache_salt, request.tokens, limit)
        num_cached, node = match.start(size, has_states=self._has_states)
        hit = Hit(num_matched=max(num_matched, len(match.nodes) * size))
        if node is not None:
            hit = hit._replace(
                num_cached=num_cached,
                pages=tuple(each.page for each in match.nodes[: num_cached // size]),
                tail_page=node.page if num_cached % size else 0,
                checkpoint=node.checkpoint,
                node=node,
            )
        self._found = key, hit
        return hit

    def follow(self, request: Request) -> None:
        """A request has a row from here on, behind whatever tokens; nothing need come for it."""
        if self._is_on:
            self._at[request] = self.store.tree.root(request.cache_salt)
        if self._arrivals is not None:
            self._arrivals.drop(request)

    def enter(self, request: Request, hit: Hit) -> None:
        """A request, which has a slot, enters at `hit`, whose pages are held for it."""
        if not self._is_on:
            return
        if why_not := self.why_not(request):
            self.stats.skipped[why_not] += 1
        elif request.generation == 1:
            request.num_cached_tokens = hit.num_cached
            self.stats.of_request(len(request.tokens), hit.num_cached, hit.num_matched)
        else:
            self.stats.num_resumed += hit.num_cached
        if hit.node is not None:
            self.store.begin_late()
            self.store.touch(hit.node)
            for length in request.cache_boundaries:
                self.store.touch_before(request, hit.node, length)
            at = hit.node.parent if hit.tail_page else hit.node
            self._at[request] = at or self._at[request]
        if self._keeps_ends:
            self._stops[request] = self._wanted(request, hit)
        if hit.num_cached:
            self.store.copies.append(self._begin(request, hit))

    def _begin(self, request: Request, hit: Hit) -> Fork:
        own = self.store.pool.allocate(1) if hit.tail_page else []
        request.pages = [*hit.pages, *own]
        request.num_pages_sent = len(request.pages)
        pages = (hit.tail_page, own[0]) if own else (0, 0)
        return Fork(hit.checkpoint, request.slot, *pages, tuple(request.pages))

    @staticmethod
    def why_not(request: Request) -> str:
        """Why a request computes its whole prompt whatever is there; "": it need not."""
        if request.params.prompt_logprobs is not None:
            return "prompt_logprobs"  # they need every hidden state
        if PENALTIES in request.sampler:
            return "penalties"  # they count the tokens that steps compute
        if request.bad_words and request.num_output:
            return "bad_words"  # so do these, in the output
        return ""

    # Where chunks end, and what is kept.

    def _wanted(self, request: Request, hit: Hit) -> tuple[int, ...]:
        """Where a prompt's chunks shall end.

        Where it parts from another one; where those to come will part from it; and at its end,
        which pays where the same prompt comes again. Each costs a step, and the latter two save no
        more than what lies between them and the place before.
        """
        end = len(request.tokens) - 1
        stops = [hit.num_matched] if hit.num_matched > hit.num_cached else []
        last = max(hit.num_cached, hit.num_matched)
        for boundary in sorted(request.cache_boundaries):
            if min(boundary, end) - last >= self.min_turn:
                last = min(boundary, end)
                stops.append(last)
        return (*stops, end) if end - last >= self.min_uncached else tuple(stops)

    def chunk_end(self, request: Request, end: int) -> int:
        """Where the next chunk of a prompt ends, if it were to end at `end`."""
        if not self._has_states or request not in self._at:
            return end
        done, interval = request.num_computed, self.shapes.checkpoint_interval
        stops = [stop for stop in self._stops.get(request, ()) if stop > done]
        if interval is not None:
            stops.append((done // interval + 1) * interval)
        return min(end, *stops) if stops else end

    def computed(self, request: Request) -> None:
        """A chunk of a prompt is dispatched: its pages are whole for every later plan."""
        if request not in self._at:
            return
        self._publish(request, request.num_computed)
        if self._has_states and request.is_prefilling:
            done, interval = request.num_computed, self.shapes.checkpoint_interval
            is_prompt_end = self._keeps_ends and done == request.prefill_len - 1
            is_on_grid = interval is not None and done % interval == 0
            if is_prompt_end or is_on_grid or done in self._stops.get(request, ()):
                self.store.keep(request, self._at[request], done)

    def given(self, request: Request) -> None:
        """Tokens of a request came: whatever is in front of the newest one is computed."""
        if request in self._at:
            self._publish(request, len(request.tokens) - 1)
        elif not request.in_flight:
            self.store.settle(request)

    def ended(self, request: Request, finish: Finish) -> None:
        """The device ended a row, which it computes no more; its slot and pages are there still."""
        if self._is_on and finish is Finish.ERROR:
            self.clear()  # nobody knows which pages and states hold the NaN
        elif request in self._at and self._keeps_ends:
            self._keep_all(request, len(request.tokens) - 1)

    def preempted(self, request: Request) -> None:
        """A request is about to lose its row and pages."""
        if request not in self._at or not self._keeps_ends:
            return
        is_prefilling = request.is_prefilling
        known = request.num_computed if is_prefilling else len(request.tokens) - 1
        self._publish(request, known)
        if request.in_flight and not is_prefilling:
            self.store.keep_unsettled(request, self._at[request])
        else:
            self._keep_all(request, known)

    def leave(self, request: Request) -> None:
        """A request has no row any more, and is followed no longer."""
        if self._at.pop(request, None) is not None:
            self.store.tree.prune(request.cache_salt)
        self._stops.pop(request, None)

    def over(self, request: Request) -> None:
        """A request has ended while it waited: what it has lost is of no use."""
        self.store.drop(request)
        if self._arrivals is not None:
            self._arrivals.drop(request)

    @property
    def lets_in(self) -> bool:
        """Whether a request enters on a prefix with the next plan."""
        return any(isinstance(copy, Fork) for copy in self.store.copies)

    def take_copies(self) -> list[Copy]:
        """See `PrefixStore.take_copies`."""
        return self.store.take_copies()

    def _publish(self, request: Request, num_computed: int) -> None:
        self._at[request] = self.store.publish(request, self._at[request], num_computed)

    def _keep_all(self, request: Request, length: int) -> None:
        self.store.keep(request, self._at[request], length, gives_page=True)

"""PrefixCache: looks up the cached prefix of a request that enters, and caches running requests.

Pages are published to the tree as soon as they are final: those of a prompt when their chunk is
dispatched, because later plans run later, and those of an output when all their tokens are known.
A model with recurrent states can resume only at a cached state. Between steps, a separate plan
(`plan.EXPORT`) copies the state of a row to the cache:

    mode    cached states
    pages   none, for models without states
    align   only at multiples of `checkpoint_interval` in prompts
    all     where a prompt diverges from an earlier one, where later prompts will diverge
            (`cache_boundaries`), before the last token of a prompt, at the end of an output, at a
            preemption, and at multiples of `checkpoint_interval` if it is set

What the device evicts is copied to host memory if there is a `HostTier`; `PrefixArrivals` copies it
back for waiting requests. `copy_out` and `copy_in` copy the prefix of a request between engines.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxspec.plan.block_plan import Block, Copied, Read
from jaxspec.plan.plan import SlotCopy
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.prefix.block_index import BlockRef
from jaxspec.prefix.host_tier import HostPrefixMatch, HostTier
from jaxspec.prefix.page_pool import PagePool
from jaxspec.prefix.store import PrefixMetrics, PrefixStore
from jaxspec.prefix.tree import Node, PrefixMatch
from jaxspec.requests.request import Finish, PageTable, Request
from jaxspec.requests.sampling_features import PENALTIES
from jaxspec.requests.waiting_queue import urgency

MIN_UNCACHED = 1000  # least uncached tokens for which one repetition of a prompt pays for its state
# Least new tokens of a chat turn for a cached state at its boundary. A step of Qwen3.5-9B takes as
# long as about 200 prompt tokens: benchmarks/results, prefill_h200 and decode_h200.
MIN_TURN = 250


class PrefixHit(NamedTuple):
    """Cached prefix on the device at which a request enters: shared pages and a cached state."""

    num_cached: int = 0  # tokens of the cached prefix
    pages: tuple[int, ...] = ()  # full pages of these tokens
    tail_page: int = 0  # partly filled page of the other tokens, to be copied; 0 means none
    checkpoint: int = 0  # slot of the cached state at their end; 0 without states
    node: Node | None = None  # node of the last token
    num_matched: int = 0  # tokens in full pages of any tier


class PrefixCache:
    """Tracks running requests; `SchedulerLimits.prefix_caching` decides what is cached of them."""

    def __init__(self, shapes: StepShapes, limits: SchedulerLimits, tier: HostTier | None = None):
        """Start empty; `tier` is unused if prefixes are not cached."""
        self.shapes, self.limits = shapes, limits
        self.min_uncached, self.min_turn = MIN_UNCACHED, MIN_TURN
        self.counts = PrefixMetrics()
        self._is_on = limits.caches_prefixes
        self._has_states = shapes.num_checkpoints > 0
        self._keeps_ends = self._has_states and limits.prefix_caching == "all"
        self.tier = tier if self._is_on else None
        self.new_pool()

    def new_pool(self) -> PagePool:
        """Drop everything and return a pool with all pages free."""
        self.store = PrefixStore(self.shapes, self.counts, self.tier)
        self._arrivals = None
        if self.tier is not None:
            self._arrivals = PrefixArrivals(self.store, self.tier)
        self._forget()
        return self.store.pool

    def clear(self) -> None:
        """Drop all cached prefixes, in every tier. Running requests continue uncached."""
        self.store.clear()
        if self.tier is not None and self.tier.disk is not None:
            self.tier.disk.clear()
        self._forget()

    def renew(self, fingerprint: Callable[[], str]) -> None:
        """Drop all cached prefixes; later ones are of a model with another fingerprint."""
        self.clear()
        if self.tier is not None and self.tier.disk is not None:
            self.tier.disk.rename(fingerprint())

    def _forget(self) -> None:
        self._at: dict[Request, Node] = {}  # last node of each running request
        self._stops: dict[Request, dict[int, bool]] = {}  # see `_wanted`
        self._found: tuple[Any, PrefixHit] = (None, PrefixHit())
        if self._arrivals is not None:
            self._arrivals.clear()

    def close(self) -> None:
        """Finish writing blocks to disk; no call may follow."""
        if self.tier is not None:
            self.tier.close()

    def stats(self) -> dict[str, Any]:
        """Return the stats by name; empty if prefixes are not cached."""
        if not self._is_on:
            return {}
        now = {"num_pages": len(self.store.tree), "num_states": len(self.store.states)}
        host = {"host": self.tier.stats()} if self.tier is not None else {}
        return {"prefix_cache": {**self.counts.as_dict(), **now, **host}}

    # Lookups

    def expect(self, request: Request) -> None:
        """Announce the next request to enter; see `PrefixArrivals.expect`."""
        if self._arrivals is not None and not self.why_not(request):
            self._arrivals.expect(request)

    def is_coming(self, request: Request, num_pages: int, *, can_wait: bool) -> bool:
        """Return whether a request must wait; see `PrefixArrivals.is_coming`."""
        if self._arrivals is None or self.why_not(request):
            return False
        return self._arrivals.is_coming(request, num_pages, can_wait=can_wait)

    def find(self, request: Request) -> PrefixHit:
        """Return the hit at which a waiting request would enter now; it excludes the last token.

        Nothing is allocated: the caller holds the pages and then calls `enter`.
        """
        if not self._is_on or self.why_not(request):
            return PrefixHit()
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
        hit = PrefixHit(num_matched=max(num_matched, len(match.nodes) * size))
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
        """Start to track a request that gets a row, and stop loading blocks for it."""
        if self._is_on:
            self._at[request] = self.store.tree.root(request.cache_salt)
        if self._arrivals is not None:
            self._arrivals.drop(request)

    def enter(self, request: Request, hit: PrefixHit) -> None:
        """Let a request with a slot enter at `hit`, whose pages are held for it."""
        if not self._is_on:
            return
        if why_not := self.why_not(request):
            self.counts.skipped[why_not] += 1
        elif request.generation == 1:
            request.num_cached_tokens = hit.num_cached
            self.counts.of_request(len(request.tokens), hit.num_cached, hit.num_matched)
        else:
            self.counts.num_resumed += hit.num_cached
        if hit.node is not None:
            self.store.touch(hit.node)
            for length in request.cache_boundaries:
                self.store.touch_before(request, hit.node, length)
            at = hit.node.parent if hit.tail_page else hit.node
            self._at[request] = at or self._at[request]
        if self._keeps_ends:
            self._stops[request] = self._wanted(request, hit)
        if hit.num_cached:
            self.store.copies.append(self._begin(request, hit))

    def _begin(self, request: Request, hit: PrefixHit) -> SlotCopy:
        own = self.store.pool.allocate(1) if hit.tail_page else []
        request.pages = PageTable([*hit.pages, *own], is_sent=True)
        pages = (hit.tail_page, own[0]) if own else (0, 0)
        return SlotCopy(hit.checkpoint, request.slot, *pages, tuple(request.pages))

    @staticmethod
    def why_not(request: Request) -> str:
        """Return the reason why a request cannot use cached prefixes, or ""."""
        if request.params.prompt_logprobs is not None:
            return "prompt_logprobs"  # need every hidden state
        if PENALTIES in request.features:
            return "penalties"  # are counted from the tokens that steps compute
        return ""

    # Chunks and cached states

    def _wanted(self, request: Request, hit: PrefixHit) -> dict[int, bool]:
        """Return the prefix lengths at which the chunks of a prompt should end.

        These are where it diverges from an earlier prompt, where later prompts will diverge, and
        its end, for a repetition. Each costs a step. The latter two save the tokens since the
        previous length. If these are few but at least double what is found, the state is cached on
        trial (True): a first repetition hits, but most short prompts are never repeated.
        """
        end, size = len(request.tokens) - 1, self.shapes.page_size
        stops = {hit.num_matched: False} if hit.num_matched > hit.num_cached else {}
        last = max(hit.num_cached, hit.num_matched)
        wanted = [(min(each, end), self.min_turn) for each in sorted(request.cache_boundaries)]
        for stop, least in (*wanted, (end, self.min_uncached)):
            num_saved = stop - last
            if num_saved >= least or (num_saved >= size and num_saved >= last):
                stops[stop], last = num_saved < least, stop
        return stops

    def chunk_end(self, request: Request, end: int) -> int:
        """Return the end of the next chunk of a prompt, at most `end`."""
        if not self._has_states or request not in self._at:
            return end
        done, interval = request.num_computed, self.limits.checkpoint_interval
        stops = [stop for stop in self._stops.get(request, {}) if stop > done]
        if interval is not None:
            stops.append((done // interval + 1) * interval)
        return min(end, *stops) if stops else end

    def computed(self, request: Request) -> None:
        """Publish the pages of a dispatched chunk, and cache the state at chosen lengths."""
        if request not in self._at:
            return
        self._publish(request, request.num_computed)
        if self._has_states and request.is_prefilling:
            done, interval = request.num_computed, self.limits.checkpoint_interval
            is_prompt_end = self._keeps_ends and done == request.prefill_len - 1
            is_on_grid = interval is not None and done % interval == 0
            stops = self._stops.get(request, {})
            if is_prompt_end or is_on_grid or done in stops:
                self.store.keep(request, self._at[request], done, on_trial=stops.get(done, False))

    def given(self, request: Request) -> None:
        """Publish the pages of new output tokens; all but the newest token are computed."""
        if request in self._at:
            self._publish(request, len(request.tokens) - 1)
        elif not request.in_flight:
            self.store.settle(request)

    def ended(self, request: Request, finish: Finish) -> None:
        """Cache a request that the device has ended, before its slot and pages are freed."""
        if self._is_on and finish is Finish.ERROR:
            self.clear()  # any page or state may hold the NaN
        elif request in self._at and self._keeps_ends:
            length = len(request.tokens) - 1
            is_new = any(self._stops.get(request, {}).values()) and length < self.min_uncached
            self._keep_all(request, length, on_trial=is_new)

    def preempted(self, request: Request) -> None:
        """Cache a request that is about to lose its row and pages."""
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
        """Stop tracking a request, which has lost its row."""
        if self._at.pop(request, None) is not None:
            self.store.tree.prune(request.cache_salt)
        self._stops.pop(request, None)

    def over(self, request: Request) -> None:
        """Drop the pending state of a request that ended while it waited."""
        self.store.drop(request)
        if self._arrivals is not None:
            self._arrivals.drop(request)

    def _publish(self, request: Request, num_computed: int) -> None:
        self._at[request] = self.store.publish(request, self._at[request], num_computed)

    def _keep_all(self, request: Request, length: int, *, on_trial: bool = False) -> None:
        at = self._at[request]
        self.store.keep(request, at, length, gives_page=True, on_trial=on_trial)


MAX_DISK_SECONDS = 10.0  # longest wait for the disk while no step runs


class _Look(NamedTuple):
    """Result of the last lookup of a request."""

    version: tuple[int, ...]  # limit of the tokens, then versions of the tiers
    device: PrefixMatch
    host: HostPrefixMatch


class PrefixArrivals:
    """Restores blocks of the host `tier` for waiting requests into `store`."""

    def __init__(self, store: PrefixStore, tier: HostTier):
        self._store, self._tier = store, tier
        self.clear()

    def clear(self) -> None:
        """Drop all lookups, and all blocks in host memory or staged."""
        self._tier.clear()
        self._coming: dict[Request, _Look] = {}
        self._stage()

    def expect(self, request: Request) -> None:
        """Start to load the blocks of a request that will enter soon."""
        if request not in self._coming and not request.in_flight:
            self._look(request)

    def is_coming(self, request: Request, num_pages: int, *, can_wait: bool) -> bool:
        """Return whether a request must wait for blocks that are being loaded.

        If False and `num_pages` pages are available for the request, the blocks are written into
        the pools before the next plan. With `can_wait=False` (no step runs) it waits here for the
        disk, and after a timeout continues without the blocks.
        """
        match, disk = self._look(request), self._tier.disk
        while disk is not None and any(map(disk.is_loading, match.blocks)):
            if can_wait:
                return True
            if not disk.wait(match.blocks, MAX_DISK_SECONDS):
                self.drop(request)
                return False
            match = self._look(request)  # unreadable blocks are gone
        if not match.num_tokens:
            return False
        held = sum(node.is_held for node in match.nodes)
        if num_pages > self._store.pool.num_free + held:
            return False  # too few pages for it to enter
        if can_wait and not all(map(self._tier.mover.has_landed, match.blocks)):
            return True
        if self._store.restore(request.cache_salt, match):
            num_known = len(match.nodes) * self._store.tree.page_size
            self._tier.num_hits += match.num_tokens - num_known
        return False

    def drop(self, request: Request) -> None:
        """Stop loading blocks for a request."""
        if self._coming.pop(request, None) is not None:
            self._stage()

    def num_matched(self, request: Request) -> int:
        """Return the tokens in full pages that the last lookup found in any tier."""
        return self._coming[request].host.num_matched if request in self._coming else 0

    def match(self, request: Request) -> PrefixMatch:
        """Return the current match on the device, without the last token."""
        look, tree = self._coming.get(request), self._store.tree
        limit = len(request.tokens) - 1
        if look is not None and look.version[:2] == (limit, tree.version):
            return look.device
        return tree.match(request.cache_salt, request.tokens, limit)

    def _look(self, request: Request) -> HostPrefixMatch:
        """Return the match in all tiers; it is looked up again only if a tier has changed."""
        tree, salt = self._store.tree, request.cache_salt
        limit = len(request.tokens) - 1
        version = limit, tree.version, *self._tier.versions()
        look = self._coming.get(request)
        if look is None or look.version != version:
            device = self.match(request)
            host = self._tier.find(device, tree.root(salt), request.tokens, limit)
            tree.prune(salt)
            self._coming[request] = look = _Look(version, device, host)
            self._stage()
        elif any(block.arrays is not None for block in self._unfilled):
            self._stage()
        return look.host

    def _stage(self) -> None:
        """Start to copy the blocks of waiting requests, the most urgent request first."""
        # Among equals, preempted requests come first, as in the queue.
        waiting = sorted(self._coming, key=lambda each: (urgency(each), not each.generation))
        first, *others = [self._coming[each].host.blocks for each in waiting] or [[]]
        ahead = [block for blocks in others for block in blocks]
        self._tier.stage(first, ahead)
        self._unfilled = [block for block in (*first, *ahead) if block.arrays is None]


def copy_out(prefixes: PrefixCache, request: Request) -> Copied:
    """Plan copies of a request's cached prefix to blocks on the host, and return them."""
    hit, size = prefixes.find(request), prefixes.shapes.block_pages
    reads = [
        Read(Block(is_state=False), hit.pages[first : first + size])
        for first in range(0, len(hit.pages), size)
    ]
    pages, state = tuple(read.block for read in reads), None
    if hit.checkpoint:
        state = Block(is_state=True)
        tail = (hit.tail_page,) if hit.tail_page else ()
        reads.append(Read(state, tail, hit.checkpoint))
    prefixes.store.copies += reads
    return Copied(hit.num_cached, pages, state)


def copy_in(prefixes: PrefixCache, request: Request, copied: Copied) -> None:
    """Plan to cache the prefix of a request from another engine, if there is room.

    Does nothing if as much of it is cached here, or if the engine does not cache such prefixes.
    """
    shapes, store = prefixes.shapes, prefixes.store
    has_states = shapes.num_checkpoints > 0
    is_fit = prefixes.limits.caches_prefixes and has_states == (copied.state is not None)
    if not is_fit or prefixes.find(request).num_cached >= copied.num_tokens:
        return
    size, tokens = shapes.page_size, tuple(request.tokens)
    num_full = copied.num_tokens // size
    nodes = store.tree.match(request.cache_salt, tokens, num_full * size).nodes
    pages = [
        BlockRef(
            tokens[index * size : (index + 1) * size],
            copied.pages[index // shapes.block_pages],
            index % shapes.block_pages,
        )
        for index in range(len(nodes), num_full)
    ]
    state = None
    if copied.state is not None:
        state = BlockRef(tokens[num_full * size : copied.num_tokens], copied.state)
    store.restore(
        request.cache_salt, HostPrefixMatch(copied.num_tokens, nodes, tuple(pages), state)
    )

"""What is kept of requests and what others find of it, on a device that checks every page."""

import numpy as np
import pytest
from loop import Loop, random_group

from jaxspec.request import Finish

PAGES = {"prefix_caching": "pages"}
ALL = {"prefix_caching": "all", "num_checkpoints": 4}
ALIGN = {"prefix_caching": "align", "num_checkpoints": 4, "checkpoint_interval": 8}
MODES = pytest.mark.parametrize("mode", [PAGES, ALL, ALIGN], ids=["pages", "all", "align"])
SALTS = None, "", "a"


def loop_of(mode, min_uncached=4, **sizes):
    loop = Loop(**mode, **sizes)
    loop.scheduler.prefixes.min_uncached = min_uncached
    return loop


def run(loop, *group):
    loop.add(*group)
    loop.run()
    return [request.num_cached_tokens for each in group for request in each]


def check_that_nothing_is_left(loop):
    """All is free once what is kept is forgotten."""
    loop.scheduler.prefixes.clear()
    store = loop.scheduler.prefixes.store
    assert len(store) == len(store.slots) == store.num_evictable == 0
    assert sorted(loop.scheduler.pages._free) == list(range(1, loop.scheduler.shapes.num_pages))
    assert len(store.slots._free) == loop.scheduler.shapes.num_checkpoints


@MODES
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_random_walk_among_shared_prefixes_gives_every_request_what_it_gets_alone(
    mode, num_drafts, page_size, chunk
):
    """Hits, junctions, forks, evictions, preemptions, aborts; every page and state is checked."""
    random = np.random.default_rng(num_drafts * 100 + page_size * 1000 + chunk)
    longest = -(-40 // page_size)
    counts = np.zeros(4, int)
    for num_requests in (1, 2, 5):
        loop = loop_of(
            mode,
            num_drafts=num_drafts,
            page_size=page_size,
            chunk=chunk,
            num_pages=1 + longest * num_requests,
            steps_per_dispatch=int(random.choice([1, 3])),
        )
        next_seed = 1
        for turn in range(120):
            if random.random() < 0.3:
                root, salt = int(random.choice([6, 12, 13, 20])), SALTS[random.integers(3)]
                group = random_group(random, next_seed, max_samples=4, root=root, salt=salt)
                next_seed += len(group)
                loop.add(group)
            if random.random() < 0.05 and loop.requests:
                victim = loop.requests[int(random.choice(list(loop.requests)))]
                loop.scheduler.end(victim, Finish.ABORT)
            if random.random() < 0.03 and loop.scheduler.running:
                loop.scheduler._preempt(loop.scheduler.running[-1])
            if random.random() < 0.01:
                loop.scheduler.prefixes.clear()
            if turn % 10 == 0:
                loop.depth = int(random.integers(0, 4))
            if loop.scheduler.has_work:
                loop.turn()
        loop.run()
        stats = loop.scheduler.prefixes.stats
        evicted = stats.num_evicted_pages + stats.num_evicted_checkpoints
        device, preemptions = loop.device, loop.scheduler.num_preemptions
        counts += [device.num_restores, device.num_forks, evicted, preemptions]
        check_that_nothing_is_left(loop)
    assert min(counts) > 2, counts

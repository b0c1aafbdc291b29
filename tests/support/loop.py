"""Loop: a scheduler and a fake device that runs its plans, without an engine between them."""

from collections import deque

import numpy as np
from fake_device import FakeDevice, expected_output, make_group, make_sizes

from jaxspec.prefix.host_tier import HostTier
from jaxspec.requests.request import Finish
from jaxspec.scheduler.scheduler import Scheduler


class FakeMover:
    """Pieces land some time after they were asked for; one of pages has 10 bytes, a state 30."""

    def __init__(self, random):
        self.random, self.seconds, self.staged = random, 0.0, set()
        self.num_waits = 0

    def num_bytes(self, *, is_state):
        return 30 if is_state else 10

    def stage(self, pieces):
        self.staged = set(pieces)

    def has_landed(self, piece):
        has_landed = piece not in self.staged or self.random.random() < 0.5
        self.num_waits += not has_landed
        return has_landed


class Loop:
    """A scheduler and a fake device, with `depth` steps in flight."""

    def __init__(self, depth=0, accuracy=0.6, seed=0, **sizes):
        self.random = np.random.default_rng(seed)
        self.mover = FakeMover(self.random)
        shapes, limits = make_sizes(**sizes)
        tier = HostTier(shapes, limits.host_bytes, self.mover) if limits.host_bytes else None
        self.scheduler = Scheduler(shapes, limits, tier=tier)
        self.requests = {}
        self.device = FakeDevice(self.scheduler.shapes, self.requests, self.random, accuracy)
        self.depth = depth
        self.in_flight = deque()
        self.given = {}  # what each request got, by the progress of each collected step
        self.num_steps = 0

    def add(self, *groups):
        requests = [request for group in groups for request in group]
        self.scheduler.check(requests)
        self.requests.update((request.seed, request) for request in requests)
        self.given.update((request, []) for request in requests)
        self.scheduler.add(requests)

    def schedule(self):
        step = self.scheduler.schedule()
        if step is not None:
            self.num_steps += 1
            self.in_flight.append((step, self.device.run(self.scheduler, step)))
        return step

    def collect(self):
        step, output = self.in_flight.popleft()
        self.device.collected(step)
        ended = {request for request in self.requests.values() if request.finish}
        for progress in self.scheduler.collect(step, output):
            assert progress.request not in ended, "a result of a request that had ended"
            self.given[progress.request] += progress.given.tokens

    def turn(self):
        step = self.schedule()
        if step is None:
            assert self.in_flight, "nothing to run and nothing to wait for: a deadlock"
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.collect()
        return step

    def drain(self):
        while self.in_flight:
            self.collect()

    def run(self, max_steps=5000):
        while self.scheduler.has_work:
            self.turn()
            assert self.num_steps < max_steps, "no end in sight"
        self.drain()
        self.assert_ends_are_right()

    def assert_ends_are_right(self):
        scheduler = self.scheduler
        for request in self.requests.values():
            tokens, finish = expected_output(request)
            assert request.output == self.given[request]
            assert len(request.draft_positions) == request.num_output
            metrics = request.metrics
            if request.output:
                assert metrics.arrival_time <= metrics.scheduled_time <= metrics.first_token_time
            for j, accepted in enumerate(metrics.accepted_per_position, 1):
                assert request.draft_positions.count(j) == accepted
            if request.finish == Finish.ABORT:
                assert request.output == tokens[: len(request.output)]
            else:
                assert (request.output, request.finish) == (tokens, finish)
            assert not request.pages
        assert not scheduler.has_work and not scheduler._forked_samples
        assert scheduler.pages.num_free == scheduler.shapes.num_pages - 1
        assert sorted(scheduler._free_slots) == list(range(1, scheduler.shapes.num_slots))


def random_group(random, seed, max_samples, max_len=38, **shared):
    prompt_len = int(random.choice([1, 2, random.integers(3, 25)]))
    return make_group(
        seed,
        prompt_len,
        int(random.integers(1, max_len - prompt_len)),
        n=int(random.choice([1, 1, random.integers(1, max_samples + 1)])),
        min_tokens=int(random.integers(0, 2)),
        stop_ids=tuple(random.integers(0, 50, 2).tolist()) if random.random() < 0.5 else (),
        temperature=float(random.random()),
        top_k=int(random.integers(-1, 9)),
        top_p=float(random.random() * 0.9 + 0.1),
        **shared,
    )


def wander(loop, random, num_turns, salts, dress=lambda group: None):
    """Requests that begin alike come, and some are aborted or preempted, until all have ended.

    Now and then all that is kept is forgotten. `dress` changes a group before it comes.
    """
    next_seed = 1
    for turn in range(num_turns):
        if random.random() < 0.3:
            root, salt = int(random.choice([6, 12, 13, 20])), salts[random.integers(len(salts))]
            group = random_group(random, next_seed, max_samples=4, root=root, salt=salt)
            next_seed += len(group)
            dress(group)
            loop.add(group)
        if random.random() < 0.05 and loop.requests:
            victim = loop.requests[int(random.choice(list(loop.requests)))]
            loop.scheduler.end(victim, Finish.ABORT)
        if random.random() < 0.03 and loop.scheduler.running:
            loop.scheduler.preempt(loop.scheduler.running[-1])
            loop.scheduler.num_preemptions += 1  # as if pages were short
        if random.random() < 0.01:
            loop.scheduler.prefixes.clear()
        if turn % 10 == 0:
            loop.depth = int(random.integers(0, 4))
        if loop.scheduler.has_work:
            loop.turn()
    loop.run()


def run(loop, *group):
    loop.add(*group)
    loop.run()
    return [request.num_cached_tokens for each in group for request in each]


def group_of(seed, root, length, max_tokens=4, **changes):
    return make_group(seed, length, max_tokens, root=root, **changes)

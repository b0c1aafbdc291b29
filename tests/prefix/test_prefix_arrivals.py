"""Requests that wait for what the host has, and what becomes of them."""

from fake_device import make_group
from loop import Loop

from jaxspec.plan.block_plan import Block
from jaxspec.prefix.block_index import BlockIndex
from jaxspec.prefix.host_tier import HostTier
from jaxspec.prefix.tree import PrefixTree
from jaxspec.requests.request import Finish

PAGES = {"prefix_caching": "pages", "host_bytes": 10**6, "block_pages": 2}
ALL = {"prefix_caching": "all", "num_checkpoints": 2, "host_bytes": 10**6, "block_pages": 2}


def loop_of(mode, **sizes):
    loop = Loop(**mode | sizes)
    loop.scheduler.prefixes.min_uncached = 4
    return loop


def run(loop, *group):
    loop.add(*group)
    loop.run()


def check_that_nothing_comes(loop):
    assert not loop.scheduler.prefixes._arrivals._coming and not loop.mover.staged


def group_of(seed, root, length, max_tokens=4, **changes):
    return make_group(seed, length, max_tokens, root=root, **changes)


def test_a_request_waits_for_its_pieces_only_while_others_run():
    loop = loop_of(PAGES, num_pages=24)
    loop.mover.has_landed = lambda block: False
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 30), group_of(3, 0, 30), group_of(4, 0, 30))
    (busy,), (waits,), (other,) = group_of(5, 0, 3, 12), group_of(6, 22, 22), group_of(7, 0, 3)
    loop.add([busy])
    loop.turn()
    loop.add([waits], [other])
    loop.turn()
    assert waits in loop.scheduler.waiting and other in loop.scheduler.running
    assert loop.mover.staged
    loop.run()
    assert waits.num_cached_tokens == 20  # it entered once the others had ended
    check_that_nothing_comes(loop)


def test_what_goes_while_a_request_waits_for_it_is_right_anyway():
    """A piece that the host forgets meanwhile comes all the same; after a reset nothing does."""
    for way in ("forgotten", "reset", "abort"):
        loop = loop_of(ALL, num_pages=24)
        has_landed, loop.mover.has_landed = loop.mover.has_landed, lambda block: False
        run(loop, group_of(1, 22, 22))
        run(loop, group_of(2, 0, 30), group_of(3, 0, 30), group_of(4, 0, 30))
        (busy,), (waits,) = group_of(5, 0, 3, 12), group_of(6, 22, 22)
        loop.add([busy], [waits])
        for _ in range(2):
            loop.turn()
        assert waits in loop.scheduler.waiting
        prefixes = loop.scheduler.prefixes
        if way == "forgotten":
            prefixes.tier.max_bytes = 0
            prefixes.tier._add(Block(is_state=False), [])
        elif way == "reset":
            prefixes.clear()
        else:
            loop.scheduler.end(waits, Finish.ABORT)
        assert way == "forgotten" or not loop.mover.staged
        loop.mover.has_landed = has_landed
        loop.run()
        assert waits.num_cached_tokens == 0
        check_that_nothing_comes(loop)


class SlowDisk:
    """It takes whatever leaves the host's memory, and never gives it back."""

    def __init__(self):
        self.index, self.num_waits = BlockIndex(), 0

    def poll(self):
        pass

    forget_unread = clear = poll

    def put(self, block, keys):
        self.index.add(Block(is_state=block.is_state), keys)

    def want(self, blocks, ahead):
        pass

    def is_loading(self, block):
        return block in self.index

    def wait(self, blocks, seconds):
        self.num_waits += 1
        return False


def test_a_request_goes_without_what_a_disk_does_not_give():
    loop = loop_of(PAGES, num_pages=24, host_bytes=20)
    disk = loop.scheduler.prefixes.tier.disk = SlowDisk()
    run(loop, group_of(1, 22, 22))
    run(loop, group_of(2, 0, 30), group_of(3, 0, 30), group_of(4, 0, 30))
    assert len(disk.index)
    (late,) = group_of(5, 22, 22)
    run(loop, [late])
    assert disk.num_waits > 0 and late.num_cached_tokens == 0
    check_that_nothing_comes(loop)


def waiting_loop(*changes):
    """A loop in which requests wait for what the host has, one for each of `changes`."""
    loop = loop_of(PAGES, num_pages=40)
    loop.mover.has_landed = lambda block: False
    for number, each in enumerate(changes):
        run(loop, group_of(1 + number, 22, 22, salt=each.get("salt")))
    run(loop, *[group_of(10 + number, 0, 30) for number in range(5)])
    loop.add(group_of(20, 0, 3, 12))
    loop.turn()
    waiting = []
    for number, each in enumerate(changes):
        (request,) = group_of(30 + number, 22, 22, salt=each.get("salt"))
        request.priority = each.get("priority", 0)
        waiting.append(request)
        loop.add([request])
    return loop, waiting


def test_what_a_request_waits_for_is_looked_up_once_while_nothing_changes(monkeypatch):
    loop, (waits,) = waiting_loop({})
    prefixes, looks = loop.scheduler.prefixes, []
    real_match, real_find = PrefixTree.match, HostTier.find
    monkeypatch.setattr(PrefixTree, "match", lambda *x: looks.append("tree") or real_match(*x))
    monkeypatch.setattr(HostTier, "find", lambda *x: looks.append("host") or real_find(*x))
    for _ in range(3):
        assert prefixes.is_coming(waits, 6, can_wait=True)
        assert prefixes.find(waits).num_cached == 0
    assert looks == ["tree", "host"]
    prefixes.tier._add(Block(is_state=False), [])
    assert prefixes.is_coming(waits, 6, can_wait=True) and looks == ["tree", "host", "host"]
    prefixes.store.tree.set_checkpoint(prefixes.store.tree.root("another"), 0)
    assert prefixes.is_coming(waits, 6, can_wait=True) and looks[3:] == ["tree", "host"]
    loop.run()


def test_what_the_most_urgent_request_needs_comes_first():
    loop, (late, urgent) = waiting_loop({"salt": "a", "priority": 1}, {"salt": "b"})
    prefixes, staged = loop.scheduler.prefixes, []
    for request in (late, urgent):
        assert prefixes.is_coming(request, 6, can_wait=True)
    prefixes.tier.stage = lambda first, ahead: staged.append((first, ahead))
    prefixes._arrivals._stage()
    coming = prefixes._arrivals._coming
    assert staged == [(coming[urgent].way.blocks, coming[late].way.blocks)]
    del prefixes.tier.stage
    loop.run()
    assert late.num_cached_tokens == urgent.num_cached_tokens == 20
    check_that_nothing_comes(loop)

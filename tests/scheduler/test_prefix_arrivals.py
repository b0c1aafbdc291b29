"""Requests that wait for what the host has, and what becomes of them."""

from fake_device import make_group
from loop import Loop

from jaxspec.piece_plan import Piece
from jaxspec.request import Finish

PAGES = {"prefix_caching": "pages", "host_bytes": 10**6, "piece_pages": 2}
ALL = {"prefix_caching": "all", "num_checkpoints": 2, "host_bytes": 10**6, "piece_pages": 2}


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
    loop.mover.has_landed = lambda piece: False
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
        has_landed, loop.mover.has_landed = loop.mover.has_landed, lambda piece: False
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
            prefixes.tier._add(Piece(is_state=False), [])
        elif way == "reset":
            prefixes.clear()
        else:
            loop.scheduler.end(waits, Finish.ABORT)
        assert way == "forgotten" or not loop.mover.staged
        loop.mover.has_landed = has_landed
        loop.run()
        assert waits.num_cached_tokens == 0
        check_that_nothing_comes(loop)

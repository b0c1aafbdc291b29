"""Turn: one thread at a time, and those who wait are not passed over."""

import threading
import time

import pytest
from threads import in_threads

from jaxspec.turn import Turn


def test_threads_have_it_one_after_the_other_and_give_what_they_return():
    turn, inside, most = Turn(), [], []

    def act():
        inside.append(1)
        most.append(len(inside))
        assert turn.is_mine
        time.sleep(1e-3)
        inside.pop()
        return 7

    results = in_threads(*[lambda: [turn.hold(act) for _ in range(10)]] * 4)
    assert results == [[7] * 10] * 4 and set(most) == {1} and not turn.is_mine


def test_who_has_it_or_does_not_wait_gets_nothing():
    turn = Turn()
    assert turn.hold(lambda: (turn.hold(lambda: 1), turn.hold(lambda: 1, wait=False))) == (
        None,
        None,
    )
    is_held, may_go = threading.Event(), threading.Event()

    def hold():
        turn.hold(lambda: (is_held.set(), may_go.wait(30)))

    def ask():
        is_held.wait(30)
        got = turn.hold(lambda: 1, wait=False)
        may_go.set()
        return got

    assert in_threads(hold, ask)[1] is None
    assert turn.hold(lambda: 1, wait=False) == 1


def test_an_error_gives_it_back():
    turn = Turn()
    with pytest.raises(KeyboardInterrupt):
        turn.hold(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert in_threads(lambda: turn.hold(lambda: 2)) == [2]

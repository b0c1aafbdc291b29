"""Turns of threads; what a session does with them is in test_session.py."""

import threading

import pytest
from threads import in_threads

from jaxspec.engine.session import FairLock


def test_one_thread_at_a_time_has_the_turn_and_knows_it():
    turns, inside = FairLock(), []

    def act():
        inside.append(turns.is_mine)
        assert len(inside) == 1
        return inside.pop()

    assert not turns.is_mine
    assert in_threads(*[lambda: [turns.hold(act) for _ in range(50)]] * 4) == [[True] * 50] * 4
    assert not turns.is_mine


def test_who_does_not_wait_gets_nothing_while_another_has_the_turn():
    turns, is_held, may_go = FairLock(), threading.Event(), threading.Event()
    holder = threading.Thread(target=lambda: turns.hold(lambda: (is_held.set(), may_go.wait(30))))
    holder.start()
    is_held.wait(30)
    assert turns.try_hold(lambda: "done") is None
    may_go.set()
    holder.join()
    assert turns.try_hold(lambda: "done") == "done"
    assert turns.hold(lambda: turns.try_hold(lambda: "done")) is None


def test_an_error_gives_the_turn_back():
    turns = FairLock()
    with pytest.raises(KeyError):
        turns.hold(lambda: {}["nothing"])
    assert turns.try_hold(lambda: "done") == "done"

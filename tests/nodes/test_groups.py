"""Leaders and followers in one process: how they meet, and how they part."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from jaxspec import nodes
from jaxspec.nodes import NodeError, handshake
from jaxspec.nodes import leader as leader_module
from jaxspec.nodes.connection import socket_at
from jaxspec.nodes.follower import Follower
from jaxspec.nodes.handshake import differences
from jaxspec.nodes.leader import Leader
from jaxspec.nodes.wire import Frame, receive

HOST, SECONDS = "127.0.0.1", 60
ABOUT = {"max_num_seqs": 4, "sizes": (1, 2), "version of jax": "1"}


@pytest.fixture(autouse=True)
def a_failing_test_ends(monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 60.0)


def listen():
    listening = socket_at(HOST, 0)
    return listening, listening.getsockname()[1]


@contextlib.contextmanager
def meeting(*descriptions, ranks=None, num_nodes=None):
    """Yield the futures of a leader and of followers with these descriptions, and their losses."""
    listening, port = listen()
    lost = [concurrent.futures.Future() for _ in descriptions[1:]]
    ranks = ranks or range(1, len(descriptions))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        of_leader = num_nodes or len(descriptions), descriptions[0]
        leading = pool.submit(Leader, HOST, listening, *of_leader)
        following = [
            pool.submit(Follower, HOST, port, rank, about, on_loss=loss.set_result)
            for rank, about, loss in zip(ranks, descriptions[1:], lost, strict=True)
        ]
        try:
            yield leading, following, lost
        finally:
            for each in (leading, *following):
                with contextlib.suppress(Exception):
                    (each.result(SECONDS).end if each is leading else each.result(SECONDS).close)()


def test_frames_reach_all_followers_in_order_and_answers_the_leader():
    with meeting(ABOUT, ABOUT, ABOUT) as (leading, following, lost):
        leader, followers = leading.result(SECONDS), [each.result(SECONDS) for each in following]
        for number in range(50):
            leader.call(
                lambda n=number: leader.send(Frame("run", {"n": n}, np.full(n, 3, np.int32)))
            )
        for follower in followers:
            received = [follower.receive() for _ in range(50)]
            assert [frame.fields["n"] for frame in received] == list(range(50))
            assert [frame.values.size for frame in received] == list(range(50))
        for rank, follower in enumerate(followers, 1):
            follower.send(Frame("ready", {"rank": rank}))
        assert leader.gather("ready") == [{"rank": 1}, {"rank": 2}]
        assert leader.end()
        assert [follower.receive().kind for follower in followers] == ["end", "end"]
        assert not leader.end()
        assert not any(loss.done() for loss in lost)
        with pytest.raises(NodeError):
            leader.call(lambda: None)


def test_differences_are_named_on_both_sides():
    with meeting(ABOUT, ABOUT | {"max_num_seqs": 8, "more": True}) as (leading, (follower,), _):
        for side in (leading, follower):
            with pytest.raises(ValueError, match="max_num_seqs is 4 on node 0 and 8 on node 1"):
                side.result(SECONDS)


@pytest.mark.parametrize("ranks", [(1, 1), (2,)])
def test_each_node_has_its_own_rank(ranks):
    with meeting(ABOUT, *[ABOUT] * len(ranks), ranks=ranks) as (leading, following, _):
        for side in (leading, *following):
            assert "node_rank" in str(side.exception(SECONDS))


def test_strangers_are_refused_and_do_not_disturb(monkeypatch, caplog):
    monkeypatch.setattr(handshake, "SECONDS", 5.0)
    monkeypatch.setattr(leader_module, "_MOST_HANDSHAKES", 1)
    listening, port = listen()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        leading = pool.submit(Leader, HOST, listening, 2, ABOUT)
        answers = []
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"", Frame("answer", {"proof": "0"}).to_bytes()):
            with socket.create_connection((HOST, port), timeout=SECONDS) as stranger:
                answers.append(_said_by_leader(stranger, said))
        assert all(b"proof" not in answer for answer in answers)
        follower = Follower(HOST, port, 1, ABOUT, on_loss=lambda error: None)
        assert leading.result(SECONDS).end()
        follower.close()
    assert "refused" in caplog.text


def _said_by_leader(stranger, said):
    """What the leader sends before it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):  # it closes without reading the rest
        stranger.sendall(said)
        with contextlib.suppress(OSError):  # ENOTCONN where it has closed already
            stranger.shutdown(socket.SHUT_WR)
        while part := stranger.recv(4096):
            received += part
    return received


def test_another_key_is_refused_and_the_group_still_meets():
    listening, port = listen()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        leading = pool.submit(Leader, HOST, listening, 2, ABOUT, b"one")
        with pytest.raises(ValueError, match="nodes_key_file"):
            Follower(HOST, port, 1, ABOUT, b"two")
        follower = Follower(HOST, port, 1, ABOUT, b"one", on_loss=lambda error: None)
        assert leading.result(SECONDS).end()
        follower.close()


def test_missing_nodes_are_named_in_time(monkeypatch):
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.5)
    with meeting(ABOUT, ABOUT, num_nodes=3) as (leading, (follower,), _):
        with pytest.raises(TimeoutError, match="Nodes .*2 of 3"):
            leading.result(SECONDS)
        with pytest.raises((TimeoutError, ValueError), match="Node 1"):
            follower.result(SECONDS)
    with socket.socket() as silent:  # bound, and refuses connections
        silent.bind((HOST, 0))
        with pytest.raises(TimeoutError, match="node 0 can't be reached"):
            Follower(HOST, silent.getsockname()[1], 1, ABOUT)


def test_a_lost_follower_fails_a_call_that_waits_and_ends_the_others():
    with meeting(ABOUT, ABOUT, ABOUT) as (leading, following, lost):
        leader, follower = leading.result(SECONDS), following[0].result(SECONDS)
        following[1].result(SECONDS)
        heard, forever = concurrent.futures.Future(), threading.Event()
        leader.on_loss = heard.set_result
        threading.Timer(0.1, follower.close).start()
        with pytest.raises(NodeError, match="Node 1 of the group is gone"):
            leader.call(forever.wait)
        assert "Node 1" in str(heard.result(SECONDS))
        assert "Node 1 of the group is gone" in str(lost[1].result(SECONDS))
        forever.set()
        assert not leader.end()


def test_a_silent_node_is_lost(monkeypatch):
    monkeypatch.setattr(nodes, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 100.0)
    with meeting(ABOUT, ABOUT) as (leading, (follower,), lost):
        follower.result(SECONDS)
        with pytest.raises(NodeError) as of_leader:
            leading.result(SECONDS).failed.result(SECONDS)
        reasons = str(of_leader.value), str(lost[0].result(SECONDS))
        assert any("heartbeat" in reason for reason in reasons)  # the other sees it close


def test_a_failure_of_either_side_is_told_to_the_other():
    with meeting(ABOUT, ABOUT) as (leading, (following,), _):
        leader, follower = leading.result(SECONDS), following.result(SECONDS)
        with pytest.raises(OSError), follower.loading():
            raise OSError("planted")
        with pytest.raises(NodeError, match="Node 1 of the group failed: OSError: planted"):
            leader.failed.result(SECONDS)
    with meeting(ABOUT, ABOUT) as (leading, (following,), lost):
        leader = leading.result(SECONDS)
        following.result(SECONDS)
        with pytest.raises(OSError), leader.loading():
            raise OSError("planted")
        assert "Node 0 of the group failed: planted" in str(lost[0].result(SECONDS))


@pytest.mark.parametrize("end_of", ["leader", "follower"])
def test_an_interrupt_while_loading_ends_the_group(end_of):
    with meeting(ABOUT, ABOUT) as (leading, (following,), lost):
        sides = {"leader": leading.result(SECONDS), "follower": following.result(SECONDS)}
        with pytest.raises(KeyboardInterrupt), sides[end_of].loading():
            raise KeyboardInterrupt
        assert sides[end_of].has_failed
        told = lost[0] if end_of == "leader" else sides["leader"].failed
        error = told.result(SECONDS) if end_of == "leader" else told.exception(SECONDS)
        assert "failed: KeyboardInterrupt" in str(error)


def test_the_end_closes_both_sockets_after_its_frame_and_ends_the_calls():
    before = set(threading.enumerate())
    with meeting(ABOUT, ABOUT) as (leading, (following,), lost):
        leader, follower = leading.result(SECONDS), following.result(SECONDS)
        own = set(threading.enumerate()) - before
        named = [each for each in own if each.name.startswith("jaxspec-")]
        assert len(named) == 5  # two threads of each connection, and that of calls
        assert leader.end()
        assert follower.receive().kind == "end"
        for each in named:
            each.join(SECONDS)
        assert not any(each.is_alive() for each in named)
        with pytest.raises(NodeError):
            follower.send(Frame("ready"))
        assert not lost[0].done()


def test_a_follower_that_is_lost_as_the_group_starts_fails_the_others():
    """However few connections there are when the first is lost."""
    listening, port = listen()
    lost = concurrent.futures.Future()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        leading = pool.submit(Leader, HOST, listening, 3, ABOUT)
        with socket.create_connection((HOST, port), timeout=SECONDS) as first:
            handshake.introduce(first, b"", time.monotonic() + SECONDS)
            about = handshake.plain(ABOUT)
            first.sendall(Frame("join", {"rank": 1, "description": about}).to_bytes())
        follower = Follower(HOST, port, 2, ABOUT, on_loss=lost.set_result)
        leader = leading.result(SECONDS)
        assert "Node 1 of the group is gone" in str(lost.result(SECONDS))
        assert not leader.end()
        follower.close()


def test_the_deadline_of_a_handshake_is_that_of_all_its_bytes():
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"\x09")
        with pytest.raises(TimeoutError):
            receive(far, deadline=time.monotonic() + 0.05)
        with pytest.raises(TimeoutError):
            receive(far, deadline=time.monotonic() - 1)


def test_equal_descriptions_have_no_differences():
    assert differences(ABOUT, dict(ABOUT), 1) == ""
    assert differences({"a": None}, {}, 1) == ""

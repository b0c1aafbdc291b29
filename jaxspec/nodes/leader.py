"""`Leader`: the connections of node 0 to all other nodes."""

import concurrent.futures
import contextlib
import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxspec import nodes
from jaxspec.nodes import NodeError, handshake
from jaxspec.nodes.connection import Connection, end_process, free_port
from jaxspec.nodes.handshake import AuthenticationError, differences
from jaxspec.nodes.wire import Frame, FrameError, receive

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Call = tuple[concurrent.futures.Future[Any], Callable[[], Any]]
_LATE = 5.0  # seconds that a failed call waits for the loss of a node, which may have caused it
_LOOK = 0.2  # seconds between looks at the time while nodes connect
_MOST_HANDSHAKES = 16  # at a time; other connections wait


class Leader:
    """Node 0 of a group: accepts the followers, sends frames to all of them, and ends them.

    `call` runs functions in a thread of the leader, one after another. So an interrupt of the
    caller never leaves a frame sent in part, or sent without the launch after it, and a caller
    gets the loss of a node as an error although the thread may wait for a device forever.
    """

    def __init__(
        self,
        address: str,
        listening: socket.socket,
        num_nodes: int,
        description: Mapping[str, Any],
        key: bytes = b"",
    ):
        """Wait until all followers have connected.

        Args:
            address: Address of this host that the followers connect to.
            listening: Socket that listens there (`socket_at`); it is closed at the end.
            num_nodes: Number of nodes, including this one.
            description: JSON values by name that must be equal on all nodes.
            key: Secret of the group.

        Raises:
            NodeError: a follower is gone before the group starts.
            TimeoutError: followers are missing after `JOIN_SECONDS`.
            ValueError: a follower has another description, or the same rank as another one.
        """
        self._description, self._num_nodes = handshake.plain(description), num_nodes
        self._key, self.failed = key, concurrent.futures.Future[None]()
        self.failed.set_running_or_notify_cancel()
        self.on_loss: Callable[[NodeError], object] = lambda error: None
        self._is_over, self._lock = False, threading.Lock()
        self._connections: list[Connection] = []
        joined = dict[int, socket.socket]()
        jax_address = f"[{address}]" if ":" in address else address
        try:
            with listening:
                _warn_without_key(listening, key)
                self._accept(listening, joined)
            self.jax_address = f"{jax_address}:{free_port(address)}"
            self._connect(joined)
        except BaseException:
            for connection in self._connections:
                connection.close()
            for each in joined.values():
                each.close()
            raise
        self._calls = queue.SimpleQueue[_Call | None]()
        threading.Thread(target=self._run_calls, name="jaxspec-leader", daemon=True).start()

    # Frames

    def send(self, frame: Frame) -> None:
        """Send a frame to all followers.

        Raises:
            NodeError: a node is gone.
        """
        self.check()
        for connection in self._connections:
            try:
                connection.send(frame)
            except NodeError as error:
                self._lose(error)
                raise

    def gather(self, kind: str) -> list[dict[str, Any]]:
        """Wait for a frame of each follower, and return their fields by rank.

        Raises:
            NodeError: a node is gone, or sent a frame of another kind.
        """
        found = []
        for connection in self._connections:
            frame = None
            while frame is None:
                self.check()
                with contextlib.suppress(queue.Empty):
                    frame = connection.received.get(timeout=_LOOK)
            if frame.kind != kind:
                raise NodeError(f"Node {connection.rank} sent {frame.kind!r} instead of {kind!r}.")
            found.append(frame.fields)
        return found

    @property
    def has_failed(self) -> bool:
        return self.failed.done()

    def check(self) -> None:
        """Raise the failure of the group, if there is one.

        Raises:
            NodeError: the group has failed or ended.
        """
        if self.failed.done():
            self.failed.result()
        if self._is_over:
            raise NodeError("The group of nodes has ended. Start all nodes again.")

    # Calls

    def call(self, act: Callable[[], _Result]) -> _Result:
        """Return `act()`, called in the thread of the leader.

        Raises:
            NodeError: the group has failed, even if `act` waits for a device.
            Exception: raised by `act`.
        """
        answer = concurrent.futures.Future[_Result]()
        with self._lock:
            self.check()
            self._calls.put((answer, act))
        first = concurrent.futures.FIRST_COMPLETED
        either = list[concurrent.futures.Future[Any]]([answer, self.failed])
        concurrent.futures.wait(either, return_when=first)
        if answer.done() and answer.exception() is not None:
            # The program of a lost peer may fail before the connection to it does.
            concurrent.futures.wait((self.failed,), timeout=_LATE)
        if self.failed.done():
            self.failed.result()
        return answer.result()

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, act = call
            try:
                answer.set_result(act())
            except BaseException as error:
                answer.set_exception(error)

    # End

    def end(self) -> bool:
        """End the followers, with success unless the group has failed.

        Returns:
            True unless the group has failed, or has ended before.
        """
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            self._calls.put(None)  # after the last call
        for connection in self._connections:
            connection.end(Frame("end"))
        return not self.failed.done()

    def fail(self, why: object) -> None:
        """End the followers with a failure of this node, unless the group has ended."""
        self._lose(NodeError(f"Node 0 of the group failed: {why}"))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """End the group if the block raises; an interrupt ends it, too.

        If a node is lost and the block still waits for a device, the process ends.
        """
        left = threading.Event()

        def end_soon(error: NodeError) -> None:
            if not left.wait(_LATE):
                end_process(error)

        self.on_loss = end_soon
        try:
            yield
        except BaseException as error:
            left.set()
            if self.failed.done() and isinstance(error, Exception):
                raise self.failed.exception() from error  # pyright: ignore[reportGeneralTypeIssues]
            self.fail(str(error) or type(error).__name__)
            raise
        finally:
            left.set()
            self.on_loss = lambda error: None

    def _lose(self, error: NodeError) -> None:
        with self._lock:
            if self._is_over or self.failed.done():
                return
            self.failed.set_exception(error)
        for connection in self._connections:
            connection.end(Frame("failed", {"why": str(error)}))
        self.on_loss(error)

    # Connecting

    def _accept(self, listening: socket.socket, joined: dict[int, socket.socket]) -> None:
        """Fill `joined` with the sockets of all followers by rank."""
        arrivals = queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]]()
        deadline = time.monotonic() + nodes.JOIN_SECONDS
        free = threading.Semaphore(_MOST_HANDSHAKES)
        listening.settimeout(_LOOK)
        while len(joined) < self._num_nodes - 1:
            if time.monotonic() > deadline:
                missing = sorted({*range(1, self._num_nodes)} - joined.keys())
                raise TimeoutError(
                    f"Nodes {', '.join(map(str, missing))} of {self._num_nodes} did not connect "
                    f"within {nodes.JOIN_SECONDS:g} seconds. Start them with the same options, "
                    "master_addr and master_port, and with node_rank."
                )
            if free.acquire(timeout=_LOOK):
                if (arrived := _accepted(listening)) is None:
                    free.release()
                else:
                    own = arrived, arrivals, self._key, free
                    threading.Thread(target=_shake_hands, args=own, daemon=True).start()
            while not arrivals.empty():
                self._admit(*arrivals.get(), joined)

    def _connect(self, joined: dict[int, socket.socket]) -> None:
        """Start the followers, each of which expects no other frame first."""
        start = Frame("start", {"jax_address": self.jax_address}).to_bytes()
        for rank, each in sorted(joined.items()):
            try:
                each.sendall(start)
            except OSError as error:
                raise NodeError(
                    f"Node {rank} is gone before the group starts ({error}). Read the output of "
                    "that node, and start all nodes again."
                ) from error
        with self._lock:  # so that `_lose` finds all connections
            for rank, each in sorted(joined.items()):
                self._connections.append(Connection(each, rank, self._lose))

    def _admit(
        self, arrived: socket.socket, fields: dict[str, Any], joined: dict[int, socket.socket]
    ) -> None:
        rank: Any = fields.get("rank")
        theirs, why = fields.get("description"), ""
        if type(rank) is not int or not 0 < rank < self._num_nodes or rank in joined:
            why = (
                f"each node must have its own node_rank below nnodes={self._num_nodes}, and "
                f"another one came with {rank}"
            )
        elif differing := differences(
            self._description, theirs if isinstance(theirs, dict) else {}, rank
        ):
            why = differing
        if why:
            error = f"All nodes of a group must have the same options, versions and model: {why}."
            for each in (arrived, *joined.values()):
                with contextlib.suppress(OSError):
                    each.sendall(Frame("refused", {"why": error}).to_bytes())
            arrived.close()
            raise ValueError(error)
        joined[rank] = arrived


def _warn_without_key(listening: socket.socket, key: bytes) -> None:
    address = listening.getsockname()[0]
    if not key and not ipaddress.ip_address(address).is_loopback:
        _log.warning(
            "Any host that reaches %s can join this group as a node. Give all nodes the same "
            "nodes_key_file.",
            address,
        )


def _accepted(listening: socket.socket) -> socket.socket | None:
    """Return the next connection, or None if there is none soon."""
    try:
        return listening.accept()[0]
    except TimeoutError:
        return None
    except OSError as error:  # it was aborted, or this process has too many files open
        _log.warning("A connection to the port of the nodes failed: %s.", error)
        time.sleep(_LOOK)
        return None


def _shake_hands(
    arrived: socket.socket,
    arrivals: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]],
    key: bytes,
    free: threading.Semaphore,
) -> None:
    """Authenticate a node, and put it into `arrivals` with the fields of its description."""
    try:
        deadline = time.monotonic() + handshake.SECONDS
        handshake.admit(arrived, key, deadline)
        frame = receive(arrived, max_values=0, deadline=deadline)
        if frame is None or frame.kind != "join":
            raise AuthenticationError("it does not join")
        arrived.settimeout(handshake.SECONDS)
        arrivals.put((arrived, frame.fields))
    except (AuthenticationError, FrameError, OSError) as error:
        _log.warning("A connection to the port of the nodes was refused: %s.", error)
        arrived.close()
    finally:
        free.release()

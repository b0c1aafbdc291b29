"""`Follower`: the connection of another node to node 0."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxspec import nodes
from jaxspec.nodes import NodeError, handshake
from jaxspec.nodes.connection import Connection, end_process
from jaxspec.nodes.handshake import AuthenticationError
from jaxspec.nodes.wire import Frame, FrameError, receive

_AGAIN = 0.3  # seconds between attempts to connect


class Follower:
    """A node other than 0. The loss of the leader ends the process, with `end_process`."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        description: Mapping[str, Any],
        key: bytes = b"",
        on_loss: Callable[[NodeError], object] = end_process,
    ):
        """Connect to node 0, and wait until all nodes have connected.

        Args:
            address: Address of node 0.
            port: Its port.
            rank: Number of this node.
            description: JSON values by name that must be equal on all nodes.
            key: Secret of the group.
            on_loss: Called in another thread when node 0 is lost.

        Raises:
            TimeoutError: node 0 can't be reached, or other nodes are missing, after
                `JOIN_SECONDS`.
            ValueError: node 0 has another description or another key.
        """
        deadline = time.monotonic() + nodes.JOIN_SECONDS
        connection = _connected(address, port, rank, deadline)
        try:
            handshake.introduce(connection, key, deadline)
            joining = {"rank": rank, "description": handshake.plain(description)}
            connection.sendall(Frame("join", joining).to_bytes())
            frame = receive(connection, deadline=deadline)
            if frame is None:
                raise AuthenticationError("it closed the connection")
        except TimeoutError as error:
            connection.close()
            raise _late(address, port, rank, "other nodes have not connected") from error
        except (AuthenticationError, FrameError, OSError) as error:
            connection.close()
            raise ValueError(
                f"Node {rank} was refused at master_addr={address}, master_port={port}: {error}. "
                "Give all nodes the same nodes_key_file and the address of node 0."
            ) from error
        if frame.kind != "start":
            connection.close()
            raise ValueError(str(frame.fields.get("why")))
        self.has_failed = False
        self.jax_address = str(frame.fields["jax_address"])
        self._rank, self._connection = rank, Connection(connection, 0, on_loss)

    def receive(self) -> Frame:
        """Wait for the next frame."""
        return self._connection.received.get()

    def send(self, frame: Frame) -> None:
        """Send a frame to node 0.

        Raises:
            NodeError: node 0 is gone.
        """
        self._connection.send(frame)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """End the group if the block raises; an interrupt ends it, too."""
        try:
            yield
        except BaseException as error:
            self.has_failed = True
            why = f"Node {self._rank} of the group failed: {type(error).__name__}: {error}"
            self._connection.end(Frame("failed", {"why": why}))
            raise

    def close(self) -> None:
        """Close the connection without an error on either side."""
        self._connection.close()


def _connected(address: str, port: int, rank: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=handshake.SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or str(error)
                raise _late(address, port, rank, f"node 0 can't be reached: {why}") from error
        time.sleep(_AGAIN)


def _late(address: str, port: int, rank: int, why: str) -> TimeoutError:
    return TimeoutError(
        f"Node {rank} waited {nodes.JOIN_SECONDS:g} seconds for the group at "
        f"master_addr={address}, master_port={port}, and {why}. Start all nodes with the same "
        "options, node 0 at this address."
    )

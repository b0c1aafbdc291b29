"""`Connection`: ordered frames between two nodes, with heartbeats."""

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from jaxspec import nodes
from jaxspec.nodes import NodeError
from jaxspec.nodes.wire import Frame, FrameError, receive

_BEAT = Frame("beat").to_bytes()


class Connection:
    """A connection to another node. Two threads send heartbeats and receive frames.

    A node is lost if it closes the connection, sends no heartbeat for a while, sends something
    that is not a frame, or reports a failure (`failed`).
    """

    def __init__(
        self, connection: socket.socket, rank: int, on_loss: Callable[[NodeError], object]
    ):
        """Start the threads.

        Args:
            connection: A connected socket, after the handshake.
            rank: Number of the other node.
            on_loss: Called once, in another thread, with the reason when the node is lost.
        """
        self.rank, self._socket, self._on_loss = rank, connection, on_loss
        self.received = queue.SimpleQueue[Frame]()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        connection.settimeout(nodes.SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for act in (self._receive, self._beat):
            threading.Thread(target=act, name=f"jaxspec-node-{rank}", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            NodeError: the node is gone.
        """
        self._write(frame.to_bytes())

    def end(self, frame: Frame) -> None:
        """Send a last frame if possible; the loss of the node is no longer reported."""
        self._is_over.set()
        with contextlib.suppress(NodeError, OSError):
            self.send(frame)
            self._socket.shutdown(socket.SHUT_WR)  # the other side reads the frame and closes

    def close(self) -> None:
        """Close the connection without a report."""
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:  # no write is using the descriptor
            self._socket.close()

    def _write(self, data: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error

    def _beat(self) -> None:
        with contextlib.suppress(NodeError):  # `_receive` reports it
            while not self._is_over.wait(nodes.BEAT_SECONDS):
                self._write(_BEAT)

    def _receive(self) -> None:
        try:
            while (frame := receive(self._socket)) is not None:
                if frame.kind == "failed":
                    return self._lose(NodeError(str(frame.fields.get("why"))))
                if frame.kind == "end":
                    self._is_over.set()  # the other side closes
                if frame.kind != "beat":
                    self.received.put(frame)
            self._lose(self._gone("it closed the connection"))
        except TimeoutError:
            self._lose(self._gone(f"no heartbeat for {nodes.SILENCE_SECONDS:g} seconds"))
        except (OSError, FrameError) as error:
            self._lose(self._gone(str(error)))
        finally:
            self.close()

    def _lose(self, error: NodeError) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._on_loss(error)

    def _gone(self, why: Any) -> NodeError:
        return NodeError(
            f"Node {self.rank} of the group is gone ({why}), and so the group ends. Read the "
            "output of that node, and start all nodes again."
        )


def end_process(error: NodeError) -> None:
    """Write the error to standard error and end the process with status 1, at once.

    A thread of it may wait for a device forever, and JAX may abort it meanwhile.
    """
    os.write(2, f"jaxspec: {error}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(1)


def socket_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        OSError: the address can't be bound.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise OSError(
            f"Node 0 can't listen at master_addr={address}, master_port={port}: {error.strerror}. "
            "Give an address of this host, and a port that is free."
        ) from error


def free_port(address: str) -> int:
    """Return a port of this host's `address` that nothing listens at."""
    with socket_at(address, 0) as listening:
        return listening.getsockname()[1]

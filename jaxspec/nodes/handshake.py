"""Start of a connection between nodes: mutual authentication with the shared key.

    leader      challenge                    proof
    follower               challenge, proof          description of its engine

A proof is the HMAC of both challenges, so it can't be used a second time.
"""

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from jaxspec.checks import shown
from jaxspec.nodes.wire import Frame, FrameError, receive

SECONDS = 10.0
"""Time that a new connection has for the handshake, from the leader's challenge to the join."""


class AuthenticationError(ValueError):
    """The other side has another key, or is not a node of jaxspec."""


def admit(connection: socket.socket, key: bytes, deadline: float) -> None:
    """Check a new connection as the leader.

    Args:
        connection: The connection.
        key: Secret of the group.
        deadline: Time (`time.monotonic`) at which the check ends.

    Raises:
        AuthenticationError: the other side is not a node with the same key.
        OSError: the connection failed or timed out.
    """
    connection.settimeout(SECONDS)
    own = secrets.token_hex(16)
    connection.sendall(Frame("challenge", {"challenge": own}).to_bytes())
    answer = _received(connection, "answer", deadline)
    theirs = str(answer.get("challenge"))
    if not hmac.compare_digest(str(answer.get("proof")), _proof(key, "follower", own, theirs)):
        raise AuthenticationError("it has another key")
    connection.sendall(Frame("proof", {"proof": _proof(key, "leader", own, theirs)}).to_bytes())


def introduce(connection: socket.socket, key: bytes, deadline: float) -> None:
    """Check a new connection as a follower.

    Args:
        connection: The connection.
        key: Secret of the group.
        deadline: Time (`time.monotonic`) at which the check ends.

    Raises:
        AuthenticationError: the other side is not the leader, or has another key.
        OSError: the connection failed or timed out.
    """
    connection.settimeout(SECONDS)
    theirs = str(_received(connection, "challenge", deadline).get("challenge"))
    own = secrets.token_hex(16)
    answer = {"challenge": own, "proof": _proof(key, "follower", theirs, own)}
    connection.sendall(Frame("answer", answer).to_bytes())
    proof = str(_received(connection, "proof", deadline).get("proof"))
    if not hmac.compare_digest(proof, _proof(key, "leader", theirs, own)):
        raise AuthenticationError("it has another key")


def plain(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description as the other side receives it: tuples are lists."""
    return json.loads(json.dumps(description, default=str))


def differences(leader: Mapping[str, Any], follower: Mapping[str, Any], rank: int) -> str:
    """Return the entries in which two descriptions differ as text; empty if they are equal.

    Args:
        leader: JSON values by name, of node 0.
        follower: Likewise, of the node `rank`.
        rank: Number of the follower.
    """
    names = [name for name in {**leader, **follower} if leader.get(name) != follower.get(name)]
    return "; ".join(
        f"{name} is {shown(leader.get(name))} on node 0 and {shown(follower.get(name))} on node "
        f"{rank}"
        for name in names
    )


def _received(connection: socket.socket, kind: str, deadline: float) -> dict[str, Any]:
    try:
        frame = receive(connection, max_values=0, deadline=deadline)
    except FrameError as error:
        raise AuthenticationError(f"it does not speak the protocol of nodes: {error}") from error
    if frame is None or frame.kind != kind:
        raise AuthenticationError("it has another key, or does not speak the protocol of nodes")
    return frame.fields


def _proof(key: bytes, role: str, first: str, second: str) -> str:
    text = f"jaxspec {role} {first} {second}".encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()

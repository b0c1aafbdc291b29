"""Nodes: processes of a tensor-parallel group on several hosts, connected by sockets.

Node 0, the leader, plans the steps of an engine. It sends the packed plan of every launch to the
others, the followers, which launch the same program on their devices. Nothing else is sent during
steps: devices exchange partial sums themselves, and the leader reads the outputs.

    leader      plan 0 | send, launch | plan 1 | send, launch | collect 0 | ...
    follower                  receive, launch         receive, launch

`wire` has the frames, `handshake` the proof that both sides know the key and the comparison of
their engines, `connection` a socket with heartbeats, `leader` and `follower` the two sides. Imports
no JAX.
"""


class NodeError(RuntimeError):
    """A node of the group has failed or is gone, and with it the group."""


JOIN_SECONDS = 600.0
"""Time in which all nodes must have connected."""

BEAT_SECONDS = 2.0
"""Time between heartbeats."""

SILENCE_SECONDS = 20.0
"""Time without a heartbeat after which a node counts as gone."""

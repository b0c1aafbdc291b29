"""`join`: connects this process to the other nodes of its group before a model is loaded.

The nodes connect to node 0 and compare their engines there. Then they join `jax.distributed`, whose
devices are those of all nodes.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec import nodes
from jaxspec.flight.about import digest_of, options_of_steps, versions
from jaxspec.models import resolve_folder
from jaxspec.nodes.connection import socket_at
from jaxspec.nodes.follower import Follower
from jaxspec.nodes.leader import Leader
from jaxspec.options.engine_options import EngineConfig
from jaxspec.runner.nodes import FollowerNode, LeaderNode, Node, end_group

_SHUTDOWN_SECONDS = 60  # for all nodes to leave `jax.distributed`


def join(config: EngineConfig, folder: Path, *, progress: bool) -> Node:
    """Connect to the other nodes, which must have the same engine.

    Args:
        config: Options of the engine.
        folder: Folder or GGUF file of the checkpoint.
        progress: Show progress bars.

    Raises:
        OSError: node 0 can't listen, or nodes are missing after `JOIN_SECONDS`.
        ValueError: options, versions, XLA_FLAGS, weights or keys differ, or JAX was used before.
        NodeError: another node is gone before the group starts.
    """
    if config.nnodes == 1:
        return Node()
    nnodes, rank = config.nnodes, config.node_rank
    address, port = config.master_addr, config.master_port
    about = _description(config, folder, progress=progress)
    key = _key(config.nodes_key_file)
    side = (
        Follower(address, port, rank, about, key)
        if rank
        else Leader(address, socket_at(address, port), nnodes, about, key)
    )
    atexit.register(_leave, side)
    with side.loading():
        _join_jax(side.jax_address, config)
    return FollowerNode(side) if isinstance(side, Follower) else LeaderNode(side)


def _key(file: str | Path | None) -> bytes:
    """Return the secret in a file, without spaces around it; empty without a file.

    Raises:
        ValueError: the file can't be read, or is empty.
    """
    if file is None:
        return b""
    try:
        key = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ValueError(
            f"nodes_key_file must be a file with the secret of the group, and {file} can't be "
            f"read: {error.strerror}. Check the path."
        ) from error
    if not key:
        raise ValueError(f"nodes_key_file must hold a secret, and {file} is empty.")
    return key


def _join_jax(address: str, config: EngineConfig) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    try:
        jax.distributed.initialize(
            address,
            config.nnodes,
            config.node_rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            initialization_timeout=int(nodes.JOIN_SECONDS),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except RuntimeError as error:
        raise ValueError(
            f"A process can join one group of nodes, before it uses JAX in another way: {error}"
        ) from error


def _leave(side: Leader | Follower) -> None:
    """Leave the group at exit; after a failure at once, since JAX would wait for lost nodes."""
    if side.has_failed:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)
    if isinstance(side, Leader):
        end_group(side)


def _description(config: EngineConfig, folder: Path, *, progress: bool) -> Mapping[str, Any]:
    """Return what must be equal on all nodes: options, versions, XLA's flags and checkpoints."""
    options = options_of_steps(config)
    del options["model"], options["revision"]  # other hosts may have the files elsewhere
    drafter: Any = getattr(config.speculative_config, "options", None)
    digests = [digest_of(folder)]
    if getattr(drafter, "model", None) is not None:
        has_weights = config.load_format != "dummy"
        place = resolve_folder(
            drafter.model, progress, weights=has_weights, revision=drafter.revision
        )
        digests.append(digest_of(place))
        del options["speculative_config"]["options"]["model"]
    return {
        **options,
        **{f"version of {name}": version for name, version in versions().items()},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "digest of the weights": digests,
    }

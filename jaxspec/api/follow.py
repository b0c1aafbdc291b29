"""`follow`: holds a part of a model whose node 0 is an `LLM` or a server."""

import sys
from pathlib import Path
from typing import Any

from jaxspec.api.loading import load_runner
from jaxspec.options.engine_options import EngineConfig
from jaxspec.runner.nodes import FollowerRunner


def follow(model: str | Path | None = None, **options: Any) -> None:
    """Run the part of a model that is on this node, until node 0 ends the group.

    Node 0 is an `LLM`, an `AsyncLLM` or a server with the same options and `node_rank=0`. If it is
    lost, the reason is written to standard error and this process ends with status 1.

    Args:
        model: A folder, a GGUF file or a hub id, with the same content as that of node 0; None
            means the embedded model.
        **options: The options of node 0, with this node's `node_rank`, from 1.

    Raises:
        FileNotFoundError: the model does not exist, or its folder has no configuration or weights.
        TypeError: an option is unknown.
        TimeoutError: node 0 can't be reached, or other nodes are missing, after ten minutes.
        ValueError: options, versions or weights differ from those of node 0, or as in `LLM`.
    """
    config = EngineConfig.of(model, options | {"skip_tokenizer_init": True})
    if config.node_rank == 0:
        raise ValueError(
            "follow runs the nodes from 1, got node_rank=0. Give it nnodes and node_rank, and "
            "make an LLM or a server on node 0."
        )
    progress = sys.stderr.isatty() if config.show_progress is None else config.show_progress
    runner = load_runner(config, progress=progress).runner
    assert isinstance(runner, FollowerRunner)
    runner.run_launches()

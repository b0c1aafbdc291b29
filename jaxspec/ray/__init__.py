"""Ray Serve application of the OpenAI server, with replicas on any node of a Ray cluster.

It needs the extra `ray`. `serve run jaxspec.ray:app model=MODEL num_replicas=2` starts it.
"""

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Build the application: Ray Serve's app builder for `serve run` and configuration files.

    Args:
        args: Options of `jaxspec serve` and of `RayOptions`, by name with underscores. A text for
            an option that is no text is read as JSON.

    Returns:
        The `ray.serve.Application`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: an option is unknown or invalid.
    """
    from jaxspec.ray.application import build  # arguments are tested without Ray

    return build(args)

"""The device that programs run on."""

from typing import Any

import jax


def default_device() -> Any:
    """The device that programs run on by default."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default

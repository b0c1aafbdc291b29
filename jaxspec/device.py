"""The device that programs run on, or are traced for."""

from typing import Any, NamedTuple

import jax


class StandIn(NamedTuple):
    """The properties of a device in another process that tracing depends on."""

    platform: str
    device_kind: str
    compute_capability: str | None

    @staticmethod
    def of(there: Any) -> "StandIn":
        """Return the stand-in of a device of this process."""
        capability = getattr(there, "compute_capability", None)
        return StandIn(there.platform, there.device_kind, capability)

    def memory_stats(self) -> None:
        """Return None, as devices do that report no memory."""


_stand_in: StandIn | None = None


def default_device() -> Any:
    """Return the default device, or its stand-in if this process only traces."""
    if _stand_in is not None:
        return _stand_in
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def trace_for(there: StandIn) -> None:
    """Trace programs for `there` from now on; this process can no longer run them."""
    global _stand_in
    _stand_in = there

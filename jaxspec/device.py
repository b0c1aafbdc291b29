"""The device that programs run on."""

from typing import Any, NamedTuple

import jax


class StandIn(NamedTuple):
    """What tracing asks of a device, which another process has."""

    platform: str
    device_kind: str
    compute_capability: str | None

    @staticmethod
    def of(there: Any) -> "StandIn":
        """What stands in for a device of this process."""
        capability = getattr(there, "compute_capability", None)
        return StandIn(there.platform, there.device_kind, capability)


_stand_in: StandIn | None = None


def default_device() -> Any:
    """The device that programs run on by default, or what stands in for it where none runs."""
    if _stand_in is not None:
        return _stand_in
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def trace_for(there: StandIn) -> None:
    """From now on this process traces programs for `there`, and can run none of them."""
    global _stand_in
    _stand_in = there

"""Kernel or reference: the one place that chooses, and that can say what was chosen.

The choice is made while an op is traced, from the device that programs run on by default. Leaving
it to the lowering (`jax.lax.platform_dependent`) would trace both forms of every op, also where
this JAX cannot trace the kernel, and nobody could say afterwards which of them ran.
"""

import logging

import jax

_log = logging.getLogger(__name__)
_chosen: dict[str, list[str]] = {}  # by op, in order of appearance


def runs_kernel(op: str, unsupported: str | None, *, by_choice: bool = False) -> bool:
    """Whether `op` runs its kernel here; noted for `implementations`, and logged when new.

    `unsupported` says why the kernel does not take these operands; None means that it does.
    `by_choice`: the reference is what should run, nobody need be warned.
    """
    device = _no_kernels_here()
    why = device or unsupported
    chosen = "kernel" if why is None else f"reference: {why}"
    known = _chosen.setdefault(op, [])
    if chosen not in known:
        known.append(chosen)
        # On a device that has kernels, one that falls back is slower than its user expects.
        level = logging.WARNING if why and not (device or by_choice) else logging.INFO
        _log.log(level, "%s runs its %s", op, chosen)
    return why is None


def implementations() -> dict[str, tuple[str, ...]]:
    """What each op traced in this process runs: "kernel", or "reference: " and why.

    More than one where an op was traced with operands of several kinds.
    """
    return {op: tuple(chosen) for op, chosen in _chosen.items()}


def _no_kernels_here() -> str | None:
    """Why no kernel runs on the default device, or None."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    if default.platform != "gpu":
        return f"the device is a {default.platform}"
    if default.compute_capability != "9.0":
        return f"the kernels are for Hopper (9.0), not {default.compute_capability}"
    if jax.__version_info__ < (0, 11):
        return f"the kernels need jax 0.11, not {jax.__version__}"
    return None

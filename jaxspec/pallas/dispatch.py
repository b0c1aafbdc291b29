"""Kernel or reference: the one place that chooses, and that can say what was chosen.

The choice is made while an op is traced, from the device that programs run on by default. Leaving
it to the lowering (`jax.lax.platform_dependent`) would trace both forms of every op, also where
this JAX cannot trace the kernel, and nobody could say afterwards which of them ran.
"""

import contextlib
import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxspec import device

_log = logging.getLogger(__name__)
_MEASURED = 0, 11  # the version of jax
_chosen: dict[str, list[str]] = {}  # by op, in order of appearance
_heard: list[tuple[str, str, int]] | None = None  # all choices, while somebody listens


def runs_kernel(op: str, why_not: str | None, *, rows: int, by_choice: bool = False) -> bool:
    """Whether `op` runs its kernel here; noted for `implementations`, and logged when new.

    Without rows no kernel runs, because a launch must have a block: XLA drops the reference, whose
    arrays are empty, so nothing runs and nothing is noted.

    Args:
        op: the name of the op.
        why_not: why the kernel does not take these operands; None means that it does.
        rows: rows or tokens of the operands, padding included.
        by_choice: the reference is preferred where `why_not` is given, so no warning is logged.
    """
    if not rows:
        return False
    is_hopper, missing = kernels_here()
    why = missing or why_not
    chosen = "kernel" if why is None else f"XLA: {why}"
    # Where kernels are for the device, an op without its kernel is slower than expected.
    level = logging.WARNING if why and is_hopper and not by_choice else logging.INFO
    note(op, chosen, level)
    return why is None


def note(op: str, chosen: str, level: int) -> None:
    """Remember what `op` runs as, and log it, if that is new.

    A program that was traced in another process calls it again, with what `choices` listed there.
    """
    if _heard is not None:
        _heard.append((op, chosen, level))
    known = _chosen.setdefault(op, [])
    if chosen not in known:
        known.append(chosen)
        _log.log(level, "%s runs as %s", op, chosen)


@contextlib.contextmanager
def choices() -> Iterator[list[tuple[str, str, int]]]:
    """What is chosen inside, new or not: the arguments of `note`."""
    global _heard
    _heard = heard = []
    try:
        yield heard
    finally:
        _heard = None


def layer_index(pool: jax.Array, layer: int) -> jax.Array:
    """`layer` on the device, so that all layers share one kernel; IndexError if `pool` lacks it."""
    return jnp.asarray(range(pool.shape[0])[layer], jnp.int32)


def implementations() -> dict[str, tuple[str, ...]]:
    """What each op that has a kernel runs as in this process: "kernel", or "XLA: " and why.

    More than one where an op was traced with operands of several kinds.
    """
    return {op: tuple(chosen) for op, chosen in _chosen.items()}


def kernels_here() -> tuple[bool, str | None]:
    """Whether kernels are for the default device, and why none runs there or None."""
    here = device.default_device()
    if here.platform != "gpu":
        return False, f"the device is a {here.platform}"
    if here.compute_capability != "9.0":
        return False, f"the kernels are for Hopper (9.0), not {here.compute_capability}"
    if jax.__version_info__[:2] != _MEASURED:
        return True, (
            f"the kernels run on jax 0.11 (Python 3.12), where they were measured, not on jax "
            f"{jax.__version__}; pip install 'jaxspec[cuda13]' or 'jaxspec[cuda12]' brings it"
        )
    return True, None

"""Loads, stores and compiler parameters of Mosaic GPU kernels.

Only kernel modules may import this module, `layouts` and `tensor_cores`: they import Mosaic GPU,
which takes 0.2 s and fails with some CPU builds of jaxlib.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

EXPLICIT_BARRIERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
"""For kernels with barriers wherever a thread reads what another wrote, and sums within warps."""


def next_stage(stage: Any, stages: int) -> Any:
    """Return the stage after `stage` in a ring of `stages`.

    Carrying the stage through a loop is faster than computing `j % stages`: unless `stages` is a
    power of two, the remainder takes a 64-bit multiplication.

        next_stage(4, 6) == 5, next_stage(5, 6) == 0
    """
    return jnp.where(stage == stages - 1, 0, stage + 1)


def load(ref, layout) -> Any:
    """Load `ref` into registers with this layout, even if no optimized access pattern exists."""
    # pyright checks against jax 0.10, whose signature differs; no kernel runs there.
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(ref, x):
    """Store registers in `ref`, even if no optimized access pattern exists.

    jax 0.12 rejects `ref[...] = x` for slices smaller than a sector of 32 bytes; jax 0.11 has no
    `plgpu.store`.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x

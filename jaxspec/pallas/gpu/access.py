"""Loads and stores that the kernels share.

Only kernels import this file, `layouts` and `tensor_cores`, because these import Mosaic. That takes
0.2 s, and not every build of jaxlib for a CPU can do it.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def next_stage(stage: Any, stages: int) -> Any:
    """The stage that follows in a ring of so many.

    A loop that carries the stage is faster than one that takes a remainder: by a number that is no
    power of two, a remainder is a 64-bit product.

        next_stage(4, 6) == 5, next_stage(5, 6) == 0
    """
    return jnp.where(stage == stages - 1, 0, stage + 1)


def load(ref, layout) -> Any:
    """The values of `ref` in registers of this layout, whatever accesses that takes."""
    # pyright knows the signature of jax 0.10, where no kernel runs.
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(ref, x):
    """Store registers in `ref`, whatever accesses that takes.

    jax 0.12 refuses `ref[...] = x` for pieces smaller than a sector of 32 bytes; jax 0.11 has no
    other way.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x

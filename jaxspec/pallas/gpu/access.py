"""Loads, stores and compiler parameters of Mosaic GPU kernels.

Only kernel modules may import this module, `layouts` and `tensor_cores`: they import Mosaic GPU,
which takes 0.2 s and fails with some CPU builds of jaxlib.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

EXPLICIT_BARRIERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
"""For kernels with barriers wherever a thread reads what another wrote, and sums within warps."""

_SWIZZLED = 16  # bytes


def next_stage(stage: Any, stages: int) -> Any:
    """Return the stage after `stage` in a ring of `stages`.

    Carrying the stage through a loop is faster than computing `j % stages`: unless `stages` is a
    power of two, the remainder takes a 64-bit multiplication.

        next_stage(4, 6) == 5, next_stage(5, 6) == 0
    """
    return jnp.where(stage == stages - 1, 0, stage + 1)


def load(ref, layout) -> Any:
    """Load `ref` into registers with this layout, even if no optimized access pattern exists.

    Raises:
        ValueError: a thread would load vectors of more than 16 bytes from shared memory with two
            axes or more. Mosaic may swizzle that, 16 bytes at a time, and would read wrong ones.
    """
    size = _vector(layout) * ref.dtype.itemsize
    if size > _SWIZZLED and len(ref.shape) > 1 and _is_shared(ref):
        raise ValueError(
            f"Vectors from swizzled memory must have at most {_SWIZZLED} bytes, got {size}; choose "
            f"the layout for {ref.dtype}, or `load_untiled` where Mosaic does not tile."
        )
    return load_untiled(ref, layout)


def load_untiled(ref, layout) -> Any:
    """`load` from memory that Mosaic does not tile, in a kernel of `LoweringSemantics.Lane`."""
    # pyright checks against jax 0.10, whose signature differs; no kernel runs there.
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def _vector(layout) -> int:
    """Return the number of adjacent elements in a thread; 1 for layouts that rule out tiles."""
    return getattr(layout.to_mgpu(), "vector_length", 1)


def _is_shared(ref) -> bool:
    return jax.typeof(getattr(ref, "ref", ref)).memory_space == plgpu.SMEM


def store(ref, x):
    """Store registers in `ref`, even if no optimized access pattern exists.

    jax 0.12 rejects `ref[...] = x` for slices smaller than a sector of 32 bytes; jax 0.11 has no
    `plgpu.store`.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x

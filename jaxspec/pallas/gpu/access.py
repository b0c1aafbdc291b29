"""Accesses to memory that the kernels share.

Only kernels import this package: Mosaic takes 0.2 s to import, and not every build of jaxlib for a
CPU can import it.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def next_place(place: Any, places: int) -> Any:
    """The place behind this one in a ring of so many.

    Carried in a loop it costs less than a remainder by a number that is no power of two, which is a
    product of 64 bits.

        next_place(4, 6) == 5, next_place(5, 6) == 0
    """
    return jnp.where(place == places - 1, 0, place + 1)


def load(ref, layout) -> Any:
    """What `ref` holds, into registers of this layout, by whatever accesses that takes."""
    # pyright knows the signature of jax 0.10, where no kernel runs.
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def store(ref, x):
    """Also pieces smaller than a sector of 32 bytes, which jax 0.12 refuses to `ref[...] = x`."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x

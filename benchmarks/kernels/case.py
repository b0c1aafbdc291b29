"""A case of `run.py`: an op at a shape."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.regions import DecodeRegion

FEW, MANY = 4, 64  # calls of a program whose op moves more than the L2 cache, next to nothing
INPUTS = 16  # of different content, where an op's inputs are as large as what it moves of its pool


@dataclasses.dataclass
class Case:
    """One op at one shape. `run(pool, layer, *operands)` gives its output and the new pool."""

    op: str
    about: dict  # what the results say of the shape
    run: Callable
    reference: Callable | None  # None: minutes, or the host waits in it
    pool: Callable[[int], Any]  # arrays of so many layers
    layer_bytes: int  # of the pool, that one call touches
    operands: tuple
    total_bytes: int
    calls: int | None = None  # of a program, where the defaults do not suit
    writes: bool = True  # the pool, so that one call waits for the other
    flops: int = 0  # where they bound it, not the bytes


def about(model, shape, dtype, **sizes):
    """Describe an op over heads for the results; `dtype` by name."""
    return {"model": model, "heads": str(shape), "dtype": str(dtype), **sizes}


def live_rows(rows, width):
    """Slots, offsets (or positions) and lengths of rows that are all live."""
    rng = np.random.default_rng(0)
    index = 1 + rng.permutation(rows), rng.integers(0, width, rows), np.full(rows, width)
    return tuple(jnp.asarray(x, jnp.int32) for x in index)


def live_region(rows, width):
    """The region of `live_rows`, whose second array is both positions and state offsets."""
    slots, offset, length = live_rows(rows, width)
    return DecodeRegion(
        slots=slots,
        num_computed=offset,
        query_len=length,
        state_offset=offset,
        ring_length=jnp.zeros_like(slots),
    )


def filled(layers, rows, *one, dtype):
    """A pool of `one` a slot, the same values in all: the speed does not depend on them."""
    one = jax.random.normal(jax.random.key(0), one).astype(dtype)
    return jnp.broadcast_to(one, (layers, 1 + rows, *one.shape)) + jnp.zeros((), dtype)

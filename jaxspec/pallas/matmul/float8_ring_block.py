"""Ring of chunks in shared memory that one warp of a block fills, for kernels of FP8 matmuls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access


class Operands(NamedTuple):
    """Arrays of a kernel in global memory."""

    numbers: Any
    factors: Any
    weight: Any
    scale: Any
    y: Any


class Buffers(NamedTuple):
    """Shared memory of a block; `filled` and `freed` have a barrier for each stage of the ring."""

    weight: Any
    tokens: Any  # the terms of the rows, one after the other
    factors: Any
    filled: Any
    freed: Any
    out: Any


def freed_barriers(arrivals: int, stages: int, axes: tuple[str, ...]) -> Any:
    """Return barriers of stages that all readers have freed, `arrivals` of each block.

    Parts of a chunk are copied to other blocks of a cluster with these axes, if there are any, so
    these must have freed the stage, too.
    """
    if not axes:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    return plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=arrivals, num_barriers=stages)


def fill(count: Any, stages: int, freed: Any, tile: Callable[[Any], tuple[Any, Callable]]) -> None:
    """Fill the ring for `count` tiles, each stage once it was freed; at the end all are free.

    `tile(i)` returns the number of chunks of a tile, and a function of a chunk and a stage that
    starts the chunk's copies.
    """

    def await_freed(stage):
        plgpu.barrier_wait(freed.at[stage])

    def fill_tile(i, carry):
        chunks, fetch = tile(i)

        def step(j, carry):
            n, stage = carry
            pl.when(n >= stages)(lambda: await_freed(stage))
            fetch(j, stage)
            return n + 1, access.next_stage(stage, stages)

        return lax.fori_loop(0, chunks, step, carry)

    def drain(_, stage):
        await_freed(stage)
        return access.next_stage(stage, stages)

    @plgpu.warp_map  # a single warp: more would repeat the copies and their barrier arrivals
    def _(warp):
        @pl.when(warp == 0)
        def _():
            n, stage = lax.fori_loop(0, count, fill_tile, (jnp.int32(0), jnp.int32(0)))
            # No block exits while its copies to others, or their arrivals, are on their way.
            # Stages in use begin at `stage`, or at 0 if the ring was never full.
            oldest = jnp.where(n < stages, 0, stage)
            lax.fori_loop(0, jnp.minimum(n, stages), drain, oldest)

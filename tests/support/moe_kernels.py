"""The kernels of `moe_experts` in Mosaic's interpreter, for experts in 16 or in 8 bits."""

import jax
import jax.numpy as jnp

from jaxspec.pallas.moe.experts import MAX_SCATTERED, gathered, operand
from jaxspec.pallas.moe.work_list import work_list


def direct(x, experts, choices, interpreter):
    """The kernels of up to 8 tokens."""
    from jaxspec.pallas.moe import experts_kernel as kernels

    arrays, (up, down) = (choices.experts, choices.weights), (experts.up, experts.down)
    work = kernels.Direct(*choices.experts.shape, experts.number)
    x = jax.block_until_ready(operand(x, up, work.rows, interpreter))
    hidden = kernels.up_kernel(x, up, arrays, experts.activation, work=work, interpret=interpreter)
    hidden = _operand(hidden, down, work.rows, interpreter)
    return kernels.down_kernel(hidden, down, arrays, work=work, interpret=interpreter)


def one_token(x, experts, choices, parts, interpreter):
    """The kernels of one token, which sum its experts in so many parts."""
    from jaxspec.pallas.moe import experts_kernel as kernels

    arrays, (up, down) = (choices.experts, choices.weights), (experts.up, experts.down)
    work = kernels.Direct(*choices.experts.shape, experts.number)
    x = jax.block_until_ready(operand(x, up, work.rows, interpreter))
    hidden = kernels.up_kernel(x, up, arrays, experts.activation, work=work, interpret=interpreter)
    hidden = _operand(hidden, down, work.rows, interpreter)
    sums = kernels.one_token_down_kernel(
        hidden, down, choices.experts, parts=parts, interpret=interpreter
    )
    assert sums.shape == (parts, 1, down.outer) and sums.dtype == jnp.float32
    return sums


def listed(x, experts, choices, rows, interpreter):
    """The kernels of tiles of so many rows."""
    from jaxspec.pallas.moe import experts_kernel as kernels
    from jaxspec.pallas.moe.tiles_kernel import from_tiles_kernel

    none, up, down = experts.number, experts.up, experts.down
    tiles = work_list(choices, none, rows)
    x, *of_rows = gathered(
        jax.block_until_ready(operand(x, up, rows, interpreter)), tiles, choices, none, interpreter
    )
    work = kernels.Listed(*choices.experts.shape, none, tiles.expert.shape[0], rows)
    arrays = tiles.expert, tiles.count, *of_rows
    hidden = kernels.up_kernel(x, up, arrays, experts.activation, work=work, interpret=interpreter)
    hidden = _operand(hidden, down, rows, interpreter)
    if rows <= MAX_SCATTERED:
        return kernels.down_kernel(hidden, down, arrays, work=work, interpret=interpreter)
    y = kernels.tiled_kernel(hidden, down, (tiles.expert, None), work=work, interpret=interpreter)
    return from_tiles_kernel(y, tiles, choices, none=none, interpret=interpreter)


def _operand(hidden, down, rows, interpreter):
    """What XLA makes of the output of a kernel.

    The interpreter runs operations of its own in callbacks, which must not wait for others.
    """
    return jax.block_until_ready(operand(jax.block_until_ready(hidden), down, rows, interpreter))


def biased_tiles(x, experts, choices, rows, interpreter):
    """The kernels of experts with biases."""
    from jaxspec.pallas.moe.activated_experts import activated_experts

    return activated_experts(x, experts, choices, rows, interpreter)

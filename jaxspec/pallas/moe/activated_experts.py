"""Kernels' matmuls of experts that have biases (gpt-oss), or limits of their activation (Ling-3.0).

The activation and the sum over a token's experts are XLA's. In gpt-oss gate and up are in
alternating columns, which a block's registers do not hold side by side.
"""

import jax.numpy as jnp

from jaxspec.pallas.moe import experts_kernel as kernels
from jaxspec.pallas.moe.tiles_kernel import to_tiles_kernel
from jaxspec.pallas.moe.work_list import work_list


def activated_experts(x, experts, choices, rows, interpret=None):
    """Return `moe_experts` of such experts, summed, computed in tiles of `rows` rows."""
    (tokens, parts), none = choices.experts.shape, experts.number
    tiles = work_list(choices, none, rows)
    tiled, *_ = to_tiles_kernel(x, tiles, choices, none=none, interpret=interpret)
    work = kernels.Listed(tokens, parts, none, tiles.expert.shape[0], rows)

    def product(x, weight, bias):
        given = x, weight, (tiles.expert, bias)
        return kernels.tiled_kernel(*given, work=work, interpret=interpret)

    up = product(tiled, experts.up, experts.up_bias)
    limits = experts.limit_of(tiles.expert[:, None, None])
    hidden = experts.activation(up.astype(jnp.float32), limits).astype(x.dtype)
    out = product(hidden, experts.down, experts.down_bias)
    is_here = choices.experts < none
    # Places of padding are uninitialized.
    by_place = out.reshape(work.tiles * rows, out.shape[-1])
    of_parts = by_place[jnp.where(is_here, tiles.place, 0)]
    of_parts = of_parts.astype(jnp.float32) * choices.weights[:, :, None]
    return jnp.sum(jnp.where(is_here[:, :, None], of_parts, 0.0), axis=1).astype(x.dtype)

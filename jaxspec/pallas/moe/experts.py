"""The products of a layer's experts with the tokens that chose them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.norm_matmul import MAX_SUMS
from jaxspec.pallas.matmul.products import DTYPES, silu_and_mul
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import work_list
from jaxspec.pallas.norm.residual import Pending
from jaxspec.weight import DenseExperts

MAX_DIRECT = 8  # tokens that are one tile: the smallest N of wgmma
MAX_SCATTERED = 16  # rows of a tile that are put out one by one
# Choices that an expert has on average -> rows of a tile. Tiles of more rows than an expert has
# choices multiply nothing in the others; with fewer its matrices are read again.
_ROWS = {3: 8, 10: 16, 24: 32, 96: 64}
_MOST_ROWS = 128


def moe_experts(
    x: Float[Array, "tokens features"],
    gate_up: DenseExperts,
    down: DenseExperts,
    choices: Choices,
) -> Pending:
    """What each token's experts put out, times their weights, to be summed.

    It is float32 `[parts, tokens, features]`, one for each of a token's experts, so the order of
    the sum depends on the token alone. Padding gets zeros. The kernels read only experts that were
    chosen, and make some of the sum themselves, always in one order:

    * one token: no more parts than `norm_matmul` takes in one kernel;
    * up to 8 tokens are one tile, which every expert gets whole;
    * more are brought together by expert, in tiles of 8 to 128 (`work_list`);
    * from tiles of 32 on each part is rounded to the dtype of `x`, and so is their sum, which is
      `[tokens, features]`.
    """
    if not dispatch.runs_kernel("moe_experts", why_not_kernel(x, gate_up, down)):
        return moe_experts_reference(x, gate_up, down, choices)
    if x.shape[0] <= MAX_DIRECT:
        return _few_tokens(x, gate_up, down, choices)
    return _many_tokens(x, gate_up, down, choices)


def _few_tokens(x, gate_up, down, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels

    (tokens, parts), none = choices.experts.shape, gate_up.num_experts
    work, arrays = kernels.Direct(tokens, parts, none), (choices.experts, choices.weights)
    hidden = kernels.up_kernel(x, gate_up.array, arrays, work=work)
    if tokens > 1:
        return kernels.down_kernel(hidden, down.array, arrays, work=work)
    sums = max(1, min(parts, MAX_SUMS // x.shape[1]))
    return kernels.one_token_down_kernel(hidden, down.array, choices.experts, parts=sums)


def _many_tokens(x, gate_up, down, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels
    from jaxspec.pallas.moe import tiles_kernel

    (tokens, parts), none = choices.experts.shape, gate_up.num_experts
    tiles = work_list(choices, none, tile_rows(tokens, parts, none))
    tiled, *of_rows = tiles_kernel.to_tiles_kernel(x, tiles, choices, none=none)
    work = kernels.Listed(tokens, parts, none, tiles.expert.shape[0], tiles.rows)
    arrays = tiles.expert, tiles.count, *of_rows
    hidden = kernels.up_kernel(tiled, gate_up.array, arrays, work=work)
    if tiles.rows <= MAX_SCATTERED:
        return kernels.down_kernel(hidden, down.array, arrays, work=work)
    y = kernels.tiled_down_kernel(hidden, down.array, arrays, work=work)
    return tiles_kernel.from_tiles_kernel(y, tiles, choices, none=none)


def tile_rows(tokens: int, parts: int, num_experts: int) -> int:
    """The rows of a tile, where there are more tokens than one tile takes.

    tile_rows(64, 9, 257) == 8, tile_rows(256, 9, 257) == 16, tile_rows(4096, 9, 257) == 128
    """
    average = tokens * parts / num_experts
    return next((rows for most, rows in _ROWS.items() if average <= most), _MOST_ROWS)


def why_not_kernel(x, gate_up, down):
    """Why the kernels do not take these operands, or None."""
    if x.dtype not in DTYPES or {gate_up.dtype, down.dtype} != {x.dtype}:
        return f"{x.dtype} and {gate_up.dtype}"
    if x.shape[1] % 128 or down.inner % 64:
        return f"experts of {x.shape[1]} x {down.inner}"
    return None


_REFERENCE_ROWS = 8  # of a tile: a decode step has fewer for most experts


def moe_experts_reference(x, gate_up, down, choices):
    """The specification of `moe_experts`: tile by tile, so only experts with work are read."""
    tokens, parts = choices.experts.shape
    work = work_list(choices, gate_up.num_experts, _REFERENCE_ROWS)
    at_place, weights = work.choices, choices.weights.reshape(-1)

    def one_tile(tile, out):
        at, expert = at_place[tile], work.expert[tile]
        rows = x[jnp.maximum(at, 0) // parts]
        hidden = silu_and_mul(_product(rows, gate_up.array[expert]).astype(x.dtype))
        y = _product(hidden, down.array[expert]) * weights[at][:, None]
        return out.at[jnp.where(at < 0, tokens * parts, at)].set(y, mode="drop")

    out = jnp.zeros((tokens * parts, x.shape[1]), jnp.float32)
    # Tiles of padding come behind those of experts.
    count = jnp.sum(work.expert < gate_up.num_experts, dtype=jnp.int32)
    out = lax.fori_loop(0, count, one_tile, out)
    return jnp.swapaxes(out.reshape(tokens, parts, -1), 0, 1)


def _product(x, matrix):
    """`x @ matrix.T` in float32."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, matrix, dims, preferred_element_type=jnp.float32)

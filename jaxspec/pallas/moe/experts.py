"""Matmuls of a layer's experts with the tokens that chose them."""

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.norm_matmul import MAX_SUMS
from jaxspec.pallas.matmul.products import DTYPES
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import work_list
from jaxspec.weight import DenseExperts

MAX_DIRECT = 8  # maximum tokens in one tile: the smallest N of wgmma
MAX_SCATTERED = 16  # maximum rows of a tile that are written one by one
# Average choices per expert -> rows per tile. With more rows than choices, a tile multiplies
# padding; with fewer, the expert's matrices are read again.
_ROWS = {3: 8, 10: 16, 24: 32, 96: 64}
_MOST_ROWS = 128


@flax.struct.dataclass
class Experts:
    """Feed-forward layers of a layer's experts, each `down(activation(up(x)))`."""

    up: DenseExperts  # rows of the gate, if the activation has one, then those of up
    down: DenseExperts
    activation: Activation = flax.struct.field(pytree_node=False, default=Activation.SWIGLU)

    @property
    def number(self) -> int:
        """Number of experts, including the slices of shared ones."""
        return self.up.num_experts


def moe_experts(
    x: Float[Array, "tokens features"], experts: Experts, choices: Choices
) -> Float[Array, "*parts tokens features"]:
    """Return the outputs of each token's experts, times their weights, to be summed.

    The result is float32 `[parts, tokens, features]`, one part for each expert of a token, so the
    order of the sum depends on the token alone. Padding gets zeros, and so do parts without an
    expert on this device (`own_choices`). The kernels read only chosen
    experts, and compute some of the sum themselves, always in one order:

    * one token: no more parts than `norm_matmul` takes in one kernel;
    * up to 8 tokens form one tile, which is passed whole to every expert;
    * more tokens are gathered by expert, in tiles of 8 to 128 rows (`work_list`);
    * from tiles of 32 rows on, each part is rounded to the dtype of `x`, and so is their sum, which
      is `[tokens, features]`.
    """
    if not dispatch.runs_kernel("moe_experts", why_not_kernel(x, experts), rows=x.shape[0]):
        return moe_experts_reference(x, experts, choices)
    if x.shape[0] <= MAX_DIRECT:
        return _few_tokens(x, experts, choices)
    return _many_tokens(x, experts, choices)


def _few_tokens(x, experts, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels

    (tokens, parts), down = choices.experts.shape, experts.down.array
    work = kernels.Direct(tokens, parts, experts.number)
    arrays = choices.experts, choices.weights
    hidden = kernels.up_kernel(x, experts.up.array, arrays, experts.activation, work=work)
    if tokens > 1 or choices.has_gaps:
        return kernels.down_kernel(hidden, down, arrays, work=work)
    sums = max(1, min(parts, MAX_SUMS // x.shape[1]))
    return kernels.one_token_down_kernel(hidden, down, choices.experts, parts=sums)


def _many_tokens(x, experts, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels
    from jaxspec.pallas.moe import tiles_kernel

    (tokens, parts), none, down = choices.experts.shape, experts.number, experts.down.array
    tiles = work_list(choices, none, tile_rows(tokens, parts, none * choices.devices))
    tiled, *of_rows = tiles_kernel.to_tiles_kernel(x, tiles, choices, none=none)
    work = kernels.Listed(tokens, parts, none, tiles.expert.shape[0], tiles.rows)
    arrays = tiles.expert, tiles.count, *of_rows
    hidden = kernels.up_kernel(tiled, experts.up.array, arrays, experts.activation, work=work)
    if tiles.rows <= MAX_SCATTERED:
        return kernels.down_kernel(hidden, down, arrays, work=work)
    y = kernels.tiled_down_kernel(hidden, down, arrays, work=work)
    return tiles_kernel.from_tiles_kernel(y, tiles, choices, none=none)


def tile_rows(tokens: int, parts: int, num_experts: int) -> int:
    """Return the rows per tile, for more tokens than one tile takes.

    tile_rows(64, 9, 257) == 8, tile_rows(256, 9, 257) == 16, tile_rows(4096, 9, 257) == 128
    """
    average = tokens * parts / num_experts
    return next((rows for most, rows in _ROWS.items() if average <= most), _MOST_ROWS)


def why_not_kernel(x, experts):
    up, down = experts.up, experts.down
    if x.dtype not in DTYPES or {up.dtype, down.dtype} != {x.dtype}:
        return f"{x.dtype} and {up.dtype}"
    if x.shape[1] % 128 or down.inner % 64:
        return f"experts of {x.shape[1]} x {down.inner}"
    return None


_REFERENCE_ROWS = 8  # rows per tile; in a decode step most experts have fewer


def moe_experts_reference(x, experts, choices):
    """Reference for `moe_experts`: tile by tile, so that only experts with work are read."""
    (tokens, parts), up, down = choices.experts.shape, experts.up.array, experts.down.array
    if not tokens:  # the loop's body cannot be traced without a tile
        return jnp.zeros((parts, 0, x.shape[1]), jnp.float32)
    work = work_list(choices, experts.number, _REFERENCE_ROWS)
    at_place, weights = work.choices, choices.weights.reshape(-1)

    def one_tile(tile, out):
        at, expert = at_place[tile], work.expert[tile]
        rows = x[jnp.maximum(at, 0) // parts]
        hidden = experts.activation(_product(rows, up[expert]).astype(x.dtype))
        y = _product(hidden, down[expert]) * weights[at][:, None]
        return out.at[jnp.where(at < 0, tokens * parts, at)].set(y, mode="drop")

    out = jnp.zeros((tokens * parts, x.shape[1]), jnp.float32)
    # Tiles of padding come after those of experts.
    count = jnp.sum(work.expert < experts.number, dtype=jnp.int32)
    out = lax.fori_loop(0, count, one_tile, out)
    return jnp.swapaxes(out.reshape(tokens, parts, x.shape[1]), 0, 1)


def _product(x, matrix):
    """Return `x @ matrix.T` in float32."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, matrix, dims, preferred_element_type=jnp.float32)

"""The products of a layer's experts with the tokens that chose them."""

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

MAX_DIRECT = 8  # tokens that are one tile: the smallest N of wgmma
MAX_SCATTERED = 16  # rows of a tile that are put out one by one
# Choices that an expert has on average -> rows of a tile. Tiles of more rows than an expert has
# choices multiply nothing in the others; with fewer its matrices are read again.
_ROWS = {3: 8, 10: 16, 24: 32, 96: 64}
_MOST_ROWS = 128


@flax.struct.dataclass
class Experts:
    """The feed-forward layers of a layer's experts, each `down(activation(up(x)))`."""

    up: DenseExperts  # its rows are those of the gate, if the activation has one, then those of up
    down: DenseExperts
    activation: Activation = flax.struct.field(pytree_node=False, default=Activation.SWIGLU)

    @property
    def number(self) -> int:
        """Experts, the slices of shared ones among them."""
        return self.up.num_experts


def moe_experts(
    x: Float[Array, "tokens features"], experts: Experts, choices: Choices
) -> Float[Array, "*parts tokens features"]:
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
    if tokens > 1:
        return kernels.down_kernel(hidden, down, arrays, work=work)
    sums = max(1, min(parts, MAX_SUMS // x.shape[1]))
    return kernels.one_token_down_kernel(hidden, down, choices.experts, parts=sums)


def _many_tokens(x, experts, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels
    from jaxspec.pallas.moe import tiles_kernel

    (tokens, parts), none, down = choices.experts.shape, experts.number, experts.down.array
    tiles = work_list(choices, none, tile_rows(tokens, parts, none))
    tiled, *of_rows = tiles_kernel.to_tiles_kernel(x, tiles, choices, none=none)
    work = kernels.Listed(tokens, parts, none, tiles.expert.shape[0], tiles.rows)
    arrays = tiles.expert, tiles.count, *of_rows
    hidden = kernels.up_kernel(tiled, experts.up.array, arrays, experts.activation, work=work)
    if tiles.rows <= MAX_SCATTERED:
        return kernels.down_kernel(hidden, down, arrays, work=work)
    y = kernels.tiled_down_kernel(hidden, down, arrays, work=work)
    return tiles_kernel.from_tiles_kernel(y, tiles, choices, none=none)


def tile_rows(tokens: int, parts: int, num_experts: int) -> int:
    """The rows of a tile, where there are more tokens than one tile takes.

    tile_rows(64, 9, 257) == 8, tile_rows(256, 9, 257) == 16, tile_rows(4096, 9, 257) == 128
    """
    average = tokens * parts / num_experts
    return next((rows for most, rows in _ROWS.items() if average <= most), _MOST_ROWS)


def why_not_kernel(x, experts):
    """Why the kernels do not take these operands, or None."""
    up, down = experts.up, experts.down
    if x.dtype not in DTYPES or {up.dtype, down.dtype} != {x.dtype}:
        return f"{x.dtype} and {up.dtype}"
    if x.shape[1] % 128 or down.inner % 64:
        return f"experts of {x.shape[1]} x {down.inner}"
    return None


_REFERENCE_ROWS = 8  # of a tile: a decode step has fewer for most experts


def moe_experts_reference(x, experts, choices):
    """The specification of `moe_experts`: tile by tile, so only experts with work are read."""
    (tokens, parts), up, down = choices.experts.shape, experts.up.array, experts.down.array
    if not tokens:  # no tile, of which the loop's body would take one
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
    # Tiles of padding come behind those of experts.
    count = jnp.sum(work.expert < experts.number, dtype=jnp.int32)
    out = lax.fori_loop(0, count, one_tile, out)
    return jnp.swapaxes(out.reshape(tokens, parts, x.shape[1]), 0, 1)


def _product(x, matrix):
    """`x @ matrix.T` in float32."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, matrix, dims, preferred_element_type=jnp.float32)

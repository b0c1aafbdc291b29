"""Matmuls of a layer's experts with the tokens that chose them."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8_terms import CHUNK, ROWS, as_multiplied
from jaxspec.pallas.matmul.norm_matmul import MAX_SUMS
from jaxspec.pallas.matmul.products import BLOCK_N, DTYPES
from jaxspec.pallas.moe.float8_tokens import Float8Tokens
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import WorkList, work_list
from jaxspec.weight import DenseExperts, ExpertsWeight, InputsFirstExperts

MAX_DIRECT = ROWS  # maximum tokens in one tile: the smallest N of wgmma
MAX_SCATTERED = 16  # maximum rows of a tile that are written one by one
# Average choices per expert -> rows per tile. With more rows than choices, a tile multiplies
# padding; with fewer, the expert's matrices are read again.
_ROWS = {3: 8, 10: 16, 24: 32, 96: 64}
_MOST_ROWS = 128
# In FP8: with 128 rows registers spill, even if an activation is one number.
_MOST_FLOAT8_ROWS = 64
_MOST_SPLIT = 4096  # features that a block in FP8 splits and holds
_MOST_HELD = 8192  # the same of all experts that one block of a single token multiplies


@flax.struct.dataclass
class Experts:
    """Feed-forward layers of a layer's experts, each `down(activation(up(x)))`."""

    up: ExpertsWeight  # rows of the gate, if the activation has one, and those of up
    down: ExpertsWeight
    activation: Activation = flax.struct.field(pytree_node=False, default=Activation.SWIGLU)
    up_bias: Float[Array, "experts rows"] | None = None  # both or none
    down_bias: Float[Array, "experts features"] | None = None
    limits: Float[Array, " experts"] | None = None  # of each expert's `Activation`; inf means none

    @property
    def number(self) -> int:
        """Number of experts, including the slices of shared ones."""
        return self.up.num_experts

    @property
    def width(self) -> int:
        """Features between the two matmuls."""
        return self.up.outer // self.activation.pieces

    @property
    def activates_in_xla(self) -> bool:
        """True if no kernel of the first matmul includes the activation: `activated_experts`."""
        return self.up_bias is not None or self.limits is not None

    def limit_of(self, expert: Int[Array, "*tiles"]) -> Float[Array, "*tiles"] | None:
        return None if self.limits is None else self.limits[expert]


def moe_experts(
    x: Float[Array, "tokens features"], experts: Experts, choices: Choices
) -> Float[Array, "*parts tokens features"]:
    """Return the outputs of each token's experts, times their weights, to be summed.

    The result is float32 `[parts, tokens, features]`, one part for each expert of a token, so the
    order of the sum depends on the token alone. Padding gets zeros, and so do parts without an
    expert on this device (`own_choices`). Matrices in FP8 are multiplied as they are. The kernels
    read only chosen experts, and compute some of the sum themselves, always in one order:

    * one token: no more parts than `norm_matmul` takes in one kernel;
    * up to 8 tokens form one tile, which is passed whole to every expert;
    * more tokens are gathered by expert, in tiles of 8 to 128 rows (`work_list`);
    * from tiles of 32 rows on, each part is rounded to the dtype of `x`, and so is their sum, which
      is `[tokens, features]`;
    * experts with biases or limits are always in tiles and summed so (`activated_experts`).
    """
    if not dispatch.runs_kernel("moe_experts", why_not_kernel(x, experts), rows=x.shape[0]):
        return moe_experts_reference(x, experts, choices)
    if experts.activates_in_xla:
        from jaxspec.pallas.moe.activated_experts import activated_experts

        tokens, parts = choices.experts.shape
        rows = tile_rows(tokens, parts, experts.number * choices.devices)
        return activated_experts(x, experts, choices, rows)
    if x.shape[0] <= MAX_DIRECT:
        return _few_tokens(x, experts, choices)
    return _many_tokens(x, experts, choices)


def _few_tokens(x, experts, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels

    (tokens, parts), up, down = choices.experts.shape, experts.up, experts.down
    work = kernels.Direct(tokens, parts, experts.number)
    arrays = choices.experts, choices.weights
    x = operand(x, up, work.rows)
    hidden = kernels.up_kernel(x, up, arrays, experts.activation, work=work)
    hidden = operand(hidden, down, work.rows)
    sums = max(1, min(parts, MAX_SUMS // down.outer))
    splits = not isinstance(down, DenseExperts) and not isinstance(hidden, Float8Tokens)
    has_room = not splits or -(-parts // sums) * down.inner <= _MOST_HELD
    if tokens > 1 or choices.has_gaps or not has_room:
        return kernels.down_kernel(hidden, down, arrays, work=work)
    return kernels.one_token_down_kernel(hidden, down, choices.experts, parts=sums)


def _many_tokens(x, experts, choices):
    from jaxspec.pallas.moe import experts_kernel as kernels
    from jaxspec.pallas.moe.tiles_kernel import from_tiles_kernel

    (tokens, parts), none = choices.experts.shape, experts.number
    up, down = experts.up, experts.down
    rows = tile_rows(tokens, parts, none * choices.devices)
    if not isinstance(up, DenseExperts) or not isinstance(down, DenseExperts):
        rows = min(rows, _MOST_FLOAT8_ROWS)
    tiles = work_list(choices, none, rows)
    tiled, *of_rows = gathered(operand(x, up, rows), tiles, choices, none)
    work = kernels.Listed(tokens, parts, none, tiles.expert.shape[0], tiles.rows)
    arrays = tiles.expert, tiles.count, *of_rows
    hidden = kernels.up_kernel(tiled, up, arrays, experts.activation, work=work)
    hidden = operand(hidden, down, rows)
    if tiles.rows <= MAX_SCATTERED:
        return kernels.down_kernel(hidden, down, arrays, work=work)
    y = kernels.tiled_kernel(hidden, down, (tiles.expert, None), work=work)
    return from_tiles_kernel(y, tiles, choices, none=none)


def tile_rows(tokens: int, parts: int, num_experts: int) -> int:
    """Return the rows per tile, for more tokens than one tile takes.

    tile_rows(64, 9, 257) == 8, tile_rows(256, 9, 257) == 16, tile_rows(4096, 9, 257) == 128
    """
    average = tokens * parts / num_experts
    return next((rows for most, rows in _ROWS.items() if average <= most), _MOST_ROWS)


def operand(
    x: jax.Array, weight: ExpertsWeight, rows: int, interpret: Any = None
) -> jax.Array | Float8Tokens:
    """Return `x` as the kernels of tiles of `rows` rows read it for a matmul with `weight`.

    For experts in FP8, blocks of 8 rows split them exactly; others get `Float8Tokens`.
    """
    if isinstance(weight, DenseExperts):
        return x
    is_small = rows == MAX_DIRECT and weight.inner <= _MOST_SPLIT
    return x if is_small and weight.terms == 2 else Float8Tokens.of(x, weight, interpret)


def gathered(
    x: jax.Array | Float8Tokens, tiles: WorkList, choices: Choices, none: int, interpret: Any = None
) -> tuple[jax.Array | Float8Tokens, jax.Array, jax.Array]:
    """Return the rows of all tiles, and the choice and weight of each (`to_tiles_kernel`)."""
    from jaxspec.pallas.moe.tiles_kernel import to_tiles_kernel

    if not isinstance(x, Float8Tokens):
        return to_tiles_kernel(x, tiles, choices, none=none, interpret=interpret)
    joined, at_place, weights = to_tiles_kernel(
        x.joined, tiles, choices, none=none, interpret=interpret
    )
    return x.in_tiles(joined, at_place // choices.experts.shape[1]), at_place, weights


def why_not_kernel(x, experts):
    features, width, in_xla = x.shape[1], experts.width, experts.activates_in_xla
    if experts.activation.alternates and not in_xla:
        return "alternating columns of gate and up without biases"
    for stack in (experts.up, experts.down):
        is_dense = isinstance(stack, DenseExperts)
        if in_xla and not is_dense:
            return f"biases or limits of experts in {stack.dtype}"
        if isinstance(stack, InputsFirstExperts) and not in_xla:
            return "matrices with their inputs first without biases"
        # A float16 number has 11 significant bits: it is not the sum of two e4m3 numbers.
        if x.dtype not in DTYPES or x.dtype != (stack.dtype if is_dense else jnp.bfloat16):
            return f"{x.dtype} and {stack.dtype}"
    if in_xla and features % BLOCK_N == 0 == width % BLOCK_N:
        return None
    return why_not_sizes(features, width)


def held_features(features: int, weight: ExpertsWeight) -> int:
    """Return the features that each matrix of `weight` has: in FP8 whole chunks, with padding."""
    return features if isinstance(weight, DenseExperts) else features + -features % CHUNK


def why_not_sizes(features: int, width: int) -> str | None:
    """Return why kernels cannot multiply experts of these sizes, or None."""
    return f"experts of {features} x {width}" if features % 128 or width % BLOCK_N else None


_REFERENCE_ROWS = 8  # rows per tile; in a decode step most experts have fewer


def moe_experts_reference(x, experts, choices):
    """Reference for `moe_experts`: tile by tile, so that only experts with work are read."""
    tokens, parts = choices.experts.shape
    if not tokens:  # the loop's body cannot be traced without a tile
        return jnp.zeros((parts, 0, x.shape[1]), jnp.float32)
    work = work_list(choices, experts.number, _REFERENCE_ROWS)
    at_place, weights = work.choices, choices.weights.reshape(tokens * parts)

    def one_tile(tile):
        at, expert = at_place[tile], work.expert[tile]
        rows = x[jnp.maximum(at, 0) // parts]
        projected = _product(rows, experts.up, expert, experts.up_bias)
        hidden = experts.activation(projected.astype(x.dtype), experts.limit_of(expert))
        out = _product(hidden, experts.down, expert, experts.down_bias)
        return out * weights[at][:, None]

    # Tiles of padding come after those of experts.
    count = jnp.sum(work.expert < experts.number, dtype=jnp.int32)
    tiles = dispatch.stacked(count, len(at_place), one_tile)
    place = jnp.arange(at_place.size, dtype=jnp.int32).reshape(at_place.shape)
    # With unique indices, the gradient needs no array of the size of `out`.
    target = jnp.where(at_place < 0, tokens * parts + place, at_place)
    out = jnp.zeros((tokens * parts, x.shape[1]), jnp.float32)
    out = out.at[target].set(tiles, mode="drop", unique_indices=True)
    return jnp.swapaxes(out.reshape(tokens, parts, x.shape[1]), 0, 1)


def _product(x, weight, expert, bias):
    """Return `x` times the matrix of an expert in float32, with a bias if there is one."""
    product = _matmul(x, weight, expert)
    return product if bias is None else product + bias[expert].astype(jnp.float32)[None, :]


def _matmul(x, weight, expert):
    inputs = 0 if isinstance(weight, InputsFirstExperts) else 1
    dims = (((1,), (inputs,)), ((), ()))
    if isinstance(weight, DenseExperts):
        return lax.dot_general(x, weight.array[expert], dims, preferred_element_type=jnp.float32)
    # In float32, because entries of the matrix are not rounded.
    matrix = weight.dense(expert, 1).array[0]
    x = jnp.pad(as_multiplied(x, weight), ((0, 0), (0, weight.inner - x.shape[1])))
    return lax.dot_general(x, matrix, dims, precision=lax.Precision.HIGHEST)

"""moe_experts and its kernels against NumPy, one row with a NaN, and padding among the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import check, drawn

from jaxspec.pallas.gpu import device
from jaxspec.pallas.moe.experts import MAX_SCATTERED, moe_experts, tile_rows, why_not_kernel
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.moe.work_list import work_list
from jaxspec.weight import DenseExperts


def assert_no_races():
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    assert not get_races().races_found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_the_op_is_what_the_experts_put_out(tokens, dtype):
    operands = drawn(tokens, 3, 5, 32, 24, dtype)
    check(jax.jit(moe_experts)(*operands), *operands)


def direct(x, gate_up, down, choices, interpreter):
    """The kernels of up to 8 tokens."""
    from jaxspec.pallas.moe import experts_kernel as kernels

    arrays = choices.experts, choices.weights
    work = kernels.Direct(*choices.experts.shape, gate_up.num_experts)
    hidden = kernels.up_kernel(x, gate_up.array, arrays, work=work, interpret=interpreter)
    return kernels.down_kernel(hidden, down.array, arrays, work=work, interpret=interpreter)


def listed(x, gate_up, down, choices, rows, interpreter):
    """The kernels of tiles of so many rows."""
    from jaxspec.pallas.moe import experts_kernel as kernels
    from jaxspec.pallas.moe.tiles_kernel import from_tiles_kernel, to_tiles_kernel

    none = gate_up.num_experts
    tiles = work_list(choices, none, rows)
    x, *of_rows = to_tiles_kernel(x, tiles, choices, none=none, interpret=interpreter)
    work = kernels.Listed(*choices.experts.shape, none, tiles.expert.shape[0], rows)
    arrays = tiles.expert, tiles.count, *of_rows
    hidden = kernels.up_kernel(x, gate_up.array, arrays, work=work, interpret=interpreter)
    if rows <= MAX_SCATTERED:
        return kernels.down_kernel(hidden, down.array, arrays, work=work, interpret=interpreter)
    y = kernels.tiled_down_kernel(hidden, down.array, arrays, work=work, interpret=interpreter)
    return from_tiles_kernel(y, tiles, choices, none=none, interpret=interpreter)


@pytest.mark.parametrize(
    ("tokens", "parts", "inner", "dtype"),
    [(1, 3, 64, jnp.bfloat16), (3, 2, 128, jnp.float16), (8, 3, 64, jnp.bfloat16)],
)
def test_one_tile_for_each_expert_is_the_op_without_races(interpreter, tokens, parts, inner, dtype):
    """Of four experts, so tokens share them."""
    operands = drawn(tokens, parts, 4, 256, inner, dtype)
    check(direct(*operands, interpreter), *operands)
    assert_no_races()


def one_token(parts_of_sum, count, inner, interpreter, *, live=True):
    """The token's operands, and the kernels' sums of its `count` experts."""
    from jaxspec.pallas.moe import experts_kernel as kernels

    *operands, choices = drawn(1, count, 12, 256, inner, jnp.bfloat16)
    if not live:
        choices = Choices(jnp.full_like(choices.experts, 12), jnp.zeros_like(choices.weights))
    (x, gate_up, down), arrays = operands, (choices.experts, choices.weights)
    work = kernels.Direct(1, count, 12)
    hidden = kernels.up_kernel(x, gate_up.array, arrays, work=work, interpret=interpreter)
    sums = kernels.one_token_down_kernel(
        hidden, down.array, choices.experts, parts=parts_of_sum, interpret=interpreter
    )
    assert sums.shape == (parts_of_sum, 1, 256) and sums.dtype == jnp.float32
    return (*operands, choices), sums


@pytest.mark.parametrize(
    ("count", "sums", "inner"), [(9, 1, 64), (9, 4, 64), (11, 3, 64), (4, 3, 192), (3, 3, 128)]
)
def test_one_token_s_experts_are_summed_without_races(interpreter, count, sums, inner):
    """Sum `i` is that of the choices `i`, `i + sums` and so on; the ring may hold all of them."""
    operands, y = one_token(sums, count, inner, interpreter)
    for i, summed in enumerate(y):
        *others, choices = operands
        is_here = jnp.arange(count)[None, :] % sums == i
        check(
            summed.astype(jnp.bfloat16),
            *others,
            Choices(choices.experts, jnp.where(is_here, choices.weights, 0.0)),
        )
    assert_no_races()


def test_one_token_of_padding_gets_zeros(interpreter):
    _, y = one_token(4, 9, 64, interpreter, live=False)
    assert not np.asarray(y).any()
    assert_no_races()


@pytest.mark.parametrize(
    ("tokens", "rows", "inner", "dtype"),
    [
        (9, 8, 64, jnp.bfloat16),
        (12, 16, 128, jnp.float16),
        (24, 32, 64, jnp.float16),
        (12, 128, 64, jnp.bfloat16),
    ],
)
def test_tiles_of_any_number_of_rows_are_the_op_without_races(
    interpreter, tokens, rows, inner, dtype
):
    operands = drawn(tokens, 2, 3, 256, inner, dtype)
    check(listed(*operands, rows, interpreter), *operands)
    assert_no_races()


def test_rings_that_are_refilled_give_the_same_without_races(monkeypatch, interpreter):
    """They hold two chunks of each product, of four and three, or of eight in a tile of 64."""
    monkeypatch.setattr(device, "room", lambda blocks: 0)
    operands = drawn(4, 1, 2, 512, 192, jnp.bfloat16)
    check(direct(*operands, interpreter), *operands)
    check(listed(*operands, 64, interpreter), *operands)
    assert_no_races()


def test_without_live_tokens_everything_is_zero(interpreter):
    *operands, choices = drawn(9, 2, 3, 256, 64, jnp.bfloat16)
    choices = Choices(jnp.full_like(choices.experts, 3), jnp.zeros_like(choices.weights))
    for rows in (8, 32):  # as in other tests, so these are compiled
        check(listed(*operands, choices, rows, interpreter), *operands, choices)
    assert_no_races()


@pytest.mark.parametrize(
    ("tokens", "parts", "experts", "rows"),
    [
        (9, 9, 257, 8),
        (64, 9, 257, 8),
        (256, 9, 257, 16),
        (512, 9, 257, 32),
        (2048, 9, 257, 64),
        (4096, 9, 257, 128),
        (64, 8, 128, 16),
        (9, 1, 1, 16),
    ],
)
def test_a_tile_has_room_for_what_an_expert_has_on_average(tokens, parts, experts, rows):
    assert tile_rows(tokens, parts, experts) == rows


@pytest.mark.parametrize(
    ("dtypes", "features", "inner", "why"),
    [
        (3 * [jnp.bfloat16], 2048, 512, None),
        (3 * [jnp.float16], 128, 64, None),
        (3 * [jnp.float32], 256, 64, "float32 and float32"),
        ([jnp.float16, jnp.bfloat16, jnp.bfloat16], 256, 64, "float16 and bfloat16"),
        ([jnp.bfloat16, jnp.bfloat16, jnp.float16], 256, 64, "bfloat16 and bfloat16"),
        (3 * [jnp.bfloat16], 192, 64, "experts of 192 x 64"),
        (3 * [jnp.bfloat16], 256, 96, "experts of 256 x 96"),
    ],
)
def test_kernels_decline_what_they_cannot_multiply(dtypes, features, inner, why):
    shapes = (4, features), (5, 2 * inner, features), (5, features, inner)
    x, gate_up, down = map(jax.ShapeDtypeStruct, shapes, dtypes)
    assert why_not_kernel(x, DenseExperts(gate_up), DenseExperts(down)) == why

"""argmax_matmul against NumPy in float64; in 8 bits, of operands that these hold exactly."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.argmax_matmul import (
    argmax_matmul,
    argmax_matmul_reference,
    why_not_kernel,
)
from jaxspec.pallas.matmul.scores import NO_TOKEN
from jaxspec.requests.request import ROW_STOP_IDS
from jaxspec.weight import Dense, Float8, to_float8

INF, NAN = np.inf, np.nan
ROWS, FEATURES, IDS = 7, 16, 333

# The specification, case by case: scores, forbidden columns, the argmax.
ONE_ROW = {
    "the lowest of equals": ([1, 3, 2, 3], [], 1),
    "nothing is forbidden": ([1, 2, 3], [], 2),
    "-1 forbids nothing": ([1, 2, 3], [-1, -1], 2),
    "the largest is forbidden": ([1, 2, 3], [2, -1], 1),
    "the first of equals is forbidden": ([3, 1, 3], [0, -1], 2),
    "a column is forbidden twice": ([1, 2, 3], [2, 2], 1),
    "-1 is not the last column": ([3, 2, 1], [2, -1], 0),
    "no such column": ([1, 2, 3], [3, 1000], 2),
    "all are forbidden": ([1, 2, 3], [0, 1, 2], NO_TOKEN),
    "a NaN": ([1, NAN, 3], [], NO_TOKEN),
    "a NaN that is forbidden": ([1, NAN, 3], [1], 2),
    "a NaN beside infinity": ([INF, NAN, 3], [], NO_TOKEN),
    "only NaN": ([NAN, NAN, NAN], [], NO_TOKEN),
    "only -infinity": ([-INF, -INF, -INF], [], NO_TOKEN),
    "only infinity": ([INF, INF, INF], [], NO_TOKEN),
    "only infinities": ([-INF, INF, -INF], [], NO_TOKEN),
    "infinity beside finite": ([1, INF, 3], [], 1),
    "-infinity beside finite": ([-INF, -5, -INF], [], 1),
    "infinity is forbidden": ([1, INF, 3], [1], 2),
    "the only finite one is forbidden": ([-INF, 5, INF], [1], NO_TOKEN),
    "below zero": ([-4, -2, -3], [], 1),
}


def oracle(x, weight, forbidden):
    with np.errstate(invalid="ignore"):
        scores = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    argmax = []
    for row, ids in zip(scores, np.asarray(forbidden), strict=True):
        row[[i for i in ids if 0 <= i < row.size]] = -INF
        is_sound = np.isfinite(row).any() and not np.isnan(row).any()
        argmax.append(row.argmax() if is_sound else NO_TOKEN)
    return np.array(argmax)


def check(x, weight, forbidden):
    expected = oracle(x, weight, forbidden)
    for run in (argmax_matmul, argmax_matmul_reference):
        got = run(x, Dense(weight), jnp.asarray(forbidden, jnp.int32))
        assert got.dtype == jnp.int32 and got.shape == (len(x),)
        np.testing.assert_array_equal(got, expected)
    return expected


@pytest.mark.few(7)
@pytest.mark.parametrize("case", ONE_ROW)
def test_a_row_of_scores_has_the_argmax_of_the_table(case):
    scores, forbidden, expected = ONE_ROW[case]
    weight = jnp.asarray([scores], jnp.float32)
    assert check(jnp.ones((1, 1)), weight, np.reshape(forbidden, (1, -1))) == [expected]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_forbidden", [0, 1, 4])
@pytest.mark.parametrize("rows", [0, 1, ROWS])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_argmax_of_the_product(dtype, rows, num_forbidden):
    """The operands are small integers, which no dtype rounds. Each column comes twice, and ties."""
    random = np.random.default_rng(rows + num_forbidden)
    x = jnp.asarray(random.integers(-2, 3, (rows, FEATURES)), dtype)
    half = random.integers(-2, 3, (FEATURES, IDS // 2 + 1))
    weight = jnp.asarray(np.concatenate([half, half], axis=1)[:, :IDS], dtype)
    forbidden = np.full((rows, num_forbidden), -1)
    free = check(x, weight, forbidden)
    assert (free < half.shape[1]).all()
    for i in range(num_forbidden):  # always the column that would win
        forbidden[:, i] = check(x, weight, forbidden)
    assert num_forbidden == 0 or not (check(x, weight, forbidden) == free).any()


def operands(rows, features, ids, num_forbidden):
    """bfloat16 operands: one row has a NaN, two columns tie, and winners are forbidden."""
    random = np.random.default_rng(rows)
    x, weight = random.normal(size=(rows, features)), random.normal(size=(features, ids))
    x[1, 3] = NAN
    weight[:, ids // 3] = weight[:, 5]
    x, weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    forbidden = np.full((rows, num_forbidden), -1)
    for i in range(num_forbidden):
        forbidden[::2, i] = oracle(x, weight, forbidden)[::2]
    return x, weight, forbidden


@pytest.mark.parametrize(
    ("rows", "features", "ids", "num_forbidden"),
    [(9, 320, 328, ROW_STOP_IDS), (72, 320, 328, 2), (150, 64, 136, 1), (264, 128, 192, 0)],
)
def test_the_kernel_equals_the_oracle_without_races(
    interpreter, monkeypatch, rows, features, ids, num_forbidden
):
    """With one warpgroup and two, one tile of rows and two, one tile of columns and several."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.argmax_matmul_kernel import argmax_matmul_kernel

    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    x, weight, forbidden = operands(rows, features, ids, num_forbidden)
    kernel = functools.partial(argmax_matmul_kernel.__wrapped__, cluster=1)
    best = kernel(x, Dense(weight), jnp.asarray(forbidden, jnp.int32), interpret=interpreter)
    np.testing.assert_array_equal(best.winner, oracle(x, weight, forbidden))
    assert not get_races().races_found


def integers(rows, features, ids):
    """bfloat16 operands that 8 bits hold, and whose sums have 13 bits; each column comes twice.

    The last row has a NaN, if there are several.
    """
    random = np.random.default_rng(rows)
    x, half = random.integers(-4, 5, (rows, features)), random.integers(-4, 5, (features, ids // 2))
    x, weight = x.astype(np.float32), np.concatenate([half, half], axis=1)
    x[1:][-1:, 3] = NAN
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


@pytest.mark.parametrize(("rows", "num_forbidden"), [(1, 0), (ROWS, 2)])
def test_in_8_bits_it_is_the_argmax_of_the_rounded_weight(rows, num_forbidden):
    random = np.random.default_rng(rows)
    x, dense = random.normal(size=(rows, FEATURES)), random.normal(size=(FEATURES, IDS))
    x, dense = jnp.asarray(x, jnp.bfloat16), jnp.asarray(dense, jnp.bfloat16)
    weight, forbidden = Float8.of(Dense(dense)), np.full((rows, num_forbidden), -1)
    rounded = weight.dense().array
    for i in range(num_forbidden + 1):
        tokens = argmax_matmul(x, weight, jnp.asarray(forbidden, jnp.int32))
        np.testing.assert_array_equal(tokens, oracle(x, rounded, forbidden))
        forbidden[:, i : i + 1] = np.asarray(tokens)[:, None]


@pytest.mark.parametrize(
    ("rows", "features", "ids", "num_forbidden"),
    [(1, 384, 328, 0), (72, 256, 328, 2), (150, 128, 136, 1)],
)
def test_the_kernel_in_8_bits_equals_the_oracle_without_races(
    interpreter, monkeypatch, rows, features, ids, num_forbidden
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.argmax_matmul_kernel import argmax_matmul_kernel

    monkeypatch.setattr(device, "MULTIPROCESSORS", 2)
    x, dense = integers(rows, features, ids)
    forbidden = np.full((rows, num_forbidden), -1)
    for i in range(num_forbidden):
        forbidden[::2, i] = oracle(x, dense, forbidden)[::2]
    weight, (in_8_bits, _) = Float8.of(Dense(dense)), to_float8(x, axis=1)
    kernel = functools.partial(argmax_matmul_kernel.__wrapped__, cluster=1)
    best = kernel(in_8_bits, weight, jnp.asarray(forbidden, jnp.int32), interpret=interpreter)
    np.testing.assert_array_equal(best.winner, oracle(x, dense, forbidden))
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 8, 64, 72, 128, 136, 200, 256, 260])
@pytest.mark.parametrize(("features", "ids"), [(128, 136), (1024, 41024), (4096, 41032)])
def test_on_a_gpu_the_op_in_8_bits_equals_the_oracle(features, ids, rows):
    dispatch._chosen.pop("argmax_matmul", None)
    x, dense = integers(rows, features, ids)
    weight, forbidden = Float8.of(Dense(dense)), np.full((rows, 1), -1)
    for _ in range(2):
        tokens = argmax_matmul(x, weight, jnp.asarray(forbidden, jnp.int32))
        np.testing.assert_array_equal(tokens, oracle(x, dense, forbidden))
        forbidden[::2, 0] = np.asarray(tokens)[::2]
    assert dispatch.implementations()["argmax_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("num_forbidden", [0, ROW_STOP_IDS])
@pytest.mark.parametrize("rows", [8, 12, 36, 64, 72, 128, 136, 200, 256, 260])
@pytest.mark.parametrize("features", [1024, 4096])
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(features, rows, num_forbidden):
    dispatch._chosen.pop("argmax_matmul", None)
    x, weight, forbidden = operands(rows, features, 40 * 1024 + 64, num_forbidden)
    tokens = argmax_matmul(x, Dense(weight), jnp.asarray(forbidden, jnp.int32))
    np.testing.assert_array_equal(tokens, oracle(x, weight, forbidden))
    assert dispatch.implementations()["argmax_matmul"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [range(4), (0, 77, 8_000, 40_000)])
@pytest.mark.parametrize("rows", [8, 16, 128, 256])
def test_on_a_gpu_the_kernel_has_the_argmax_of_the_table(rows, columns):
    """The interpreter cannot show it: XLA's maximum on a CPU loses a NaN among many numbers."""
    columns = np.array(columns)
    for scores, forbidden, argmax in ONE_ROW.values():
        weight = jnp.zeros((1024, columns[-1] + 64), jnp.bfloat16).at[0].set(-INF)
        weight = weight.at[0, columns[: len(scores)]].set(jnp.asarray(scores, jnp.bfloat16))
        x = jnp.zeros((rows, 1024), jnp.bfloat16).at[:, 0].set(1)
        ids = [columns[i] if 0 <= i < len(columns) else i for i in forbidden]
        table = jnp.tile(jnp.asarray(ids, jnp.int32).reshape(1, -1), (rows, 1))
        expected = NO_TOKEN if argmax == NO_TOKEN else columns[argmax]
        assert argmax_matmul(x, Dense(weight), table).tolist() == [expected] * rows, scores


def test_a_row_that_fails_changes_no_other():
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(ROWS, FEATURES)), random.normal(size=(FEATURES, IDS))
    x[2, 3], x[4] = NAN, -INF
    x, weight = (jnp.asarray(a, jnp.float32) for a in (x, weight))
    tokens = check(x, weight, np.zeros((ROWS, 0)))
    np.testing.assert_array_equal(tokens == NO_TOKEN, np.isin(np.arange(ROWS), [2, 4]))


def test_scores_are_not_rounded_to_the_operands_dtype():
    """256 and 257 are the same number in bfloat16."""
    weight = jnp.asarray([[256, 256], [0, 1]], jnp.bfloat16)
    assert check(jnp.ones((1, 2), jnp.bfloat16), weight, np.zeros((1, 0))) == [1]


@pytest.mark.parametrize(
    ("weight", "takes"),
    [
        (Dense(jnp.zeros((1024, 64), jnp.bfloat16)), True),
        (Dense(jnp.zeros((1024, 72), jnp.bfloat16)), False),  # tiles have 64 columns
        (Float8(jnp.zeros((72, 1024), jnp.float8_e4m3fn), jnp.ones(())), True),
        (Float8(jnp.zeros((76, 1024), jnp.float8_e4m3fn), jnp.ones(())), False),
        (Float8(jnp.zeros((72, 1088), jnp.float8_e4m3fn), jnp.ones(())), False),
    ],
)
def test_the_kernel_takes_whole_tiles(weight, takes):
    x = jnp.zeros((8, weight.inner), jnp.bfloat16)
    assert (why_not_kernel(x, weight) is None) == takes
    one = x[:1]  # one row has no kernel in 16 bits
    assert (why_not_kernel(one, weight) is None) == (takes and isinstance(weight, Float8))
    assert why_not_kernel(x.astype(jnp.float32), weight)


def test_a_weight_for_other_features_is_refused():
    with pytest.raises(ValueError, match="each of the 8 features.*16 x 4"):
        argmax_matmul(jnp.ones((2, 8)), Dense(jnp.ones((16, 4))), jnp.zeros((2, 0), jnp.int32))

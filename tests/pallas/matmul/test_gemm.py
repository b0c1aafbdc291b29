"""The kernels of products of 16 to 256 rows against NumPy, with one row of NaN among the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import check, operands, product

from benchmarks.measure.shapes import HIDDEN, INTERMEDIATE
from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.gemm import MAX_PARTS, choose, num_parts, split_rows
from jaxspec.pallas.matmul.split_matmul import split_matmul
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.weight import Dense


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [
        (16, 192, 64, jnp.bfloat16),
        (24, 64, 320, jnp.float16),
        (136, 256, 192, jnp.bfloat16),  # two blocks of rows; the second is not full
    ],
)
@pytest.mark.parametrize("multiprocessors", [132, 2])
def test_the_kernel_equals_the_oracle_without_races(
    monkeypatch, interpreter, multiprocessors, tokens, inner, outer, dtype
):
    """With two multiprocessors two blocks share one, and each takes two pieces of 64 columns."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.gemm_kernel import gemm_kernel

    monkeypatch.setattr(device, "MULTIPROCESSORS", multiprocessors)
    x, weight = operands(tokens, inner, outer, dtype)
    y = gemm_kernel(x, weight, interpret=interpreter)
    assert y.dtype == dtype
    check(y, product(x, weight), dtype)
    assert not get_races().races_found


def test_a_ring_that_is_refilled_equals_the_oracle_without_races(monkeypatch, interpreter):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.gemm_kernel import gemm_kernel

    monkeypatch.setattr(device, "room", lambda blocks: 3 * 64 * 2 * (16 + 64) + 16 * 64 * 2)
    x, weight = operands(16, 448, 64, jnp.bfloat16)
    check(gemm_kernel(x, weight, interpret=interpreter), product(x, weight), jnp.bfloat16)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "dtype"),
    [(16, 512, 128, jnp.bfloat16), (136, 256, 64, jnp.float16)],
)
def test_partial_sums_equal_the_oracle_without_races(interpreter, tokens, inner, outer, dtype):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.matmul.gemm_kernel import split_gemm_kernel

    x, weight = operands(tokens, inner, outer, dtype)
    y = split_gemm_kernel(x, weight, interpret=interpreter)
    assert y.dtype == jnp.float32 and y.shape[0] == inner // 64
    check(sum_parts(y, dtype), product(x, weight), dtype)
    assert not get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(16, (16, 1)), (64, (64, 1)), (128, (128, 1)), (136, (72, 2)), (256, (128, 2))],
)
def test_blocks_share_the_rows(tokens, rows):
    assert split_rows(tokens) == rows
    assert rows[0] * rows[1] >= tokens


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "parts"),
    [
        (64, 2048, 1024, 8),
        (64, 3584, 1024, 8),
        (256, 3584, 1024, 4),
        (64, 12288, 4096, 2),
        (64, 6144, 5120, 1),
    ],
)
def test_nearly_every_multiprocessor_has_a_block(tokens, inner, outer, parts):
    assert num_parts(tokens, inner, outer) == parts


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "dtype", "why"),
    [
        (16, 1024, 5120, jnp.bfloat16, None),
        (256, 2048, 2048, jnp.float16, None),
        (64, 4096, 4096, jnp.bfloat16, None),
        (72, 4096, 5120, jnp.bfloat16, "72 rows, which make no wave of blocks"),
        (264, 1024, 1024, jnp.bfloat16, "not 16 to 256 rows, in steps of 8"),
        (20, 1024, 1024, jnp.bfloat16, "not 16 to 256 rows, in steps of 8"),
        (8, 1024, 1024, jnp.bfloat16, "not 16 to 256 rows, in steps of 8"),
        (16, 1024, 1024, jnp.float32, "float32 and float32"),
        (16, 512, 1024, jnp.bfloat16, "512 features"),
        (16, 1024, 8224, jnp.bfloat16, "a weight of 1024 x 8224"),
        (16, 1056, 1024, jnp.bfloat16, "a weight of 1056 x 1024"),
    ],
)
def test_kernels_decline_what_they_cannot_multiply(rows, inner, outer, dtype, why):
    x = jax.ShapeDtypeStruct((rows, inner), dtype)
    weight = Dense(jax.ShapeDtypeStruct((inner, outer), dtype))
    assert choose(x, weight, inner)[0] == why


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 40, 64, 128, 136, 256])
@pytest.mark.parametrize("model", HIDDEN)
def test_on_a_gpu_split_matmul_is_its_kernel_and_the_kernels_equal_the_oracle(model, tokens):
    from jaxspec.pallas.matmul.gemm_kernel import gemm_kernel

    dispatch._chosen.pop("split_matmul", None)
    hidden, inner = HIDDEN[model], INTERMEDIATE[model]
    chosen = set()
    for size in (2048, inner):
        x, weight = operands(tokens, size, hidden, jnp.bfloat16)
        expected = product(x, weight)
        why, wave = choose(x, Dense(weight), hidden, max_parts=MAX_PARTS)
        assert why is None or hidden > 2048 or tokens <= 64
        assert (wave is not None) == (why is None and hidden > 2048 and tokens > 64)
        assert wave or model != "qwen3.5-9b" or tokens <= 64
        chosen.add("kernel" if why is None else f"XLA: {why}")
        first, again = (jax.jit(split_matmul)(x, Dense(weight)) for _ in range(2))
        # As float32, because NumPy does not take two bfloat16 NaN for equal.
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))
        check(sum_parts(first, jnp.bfloat16), expected, jnp.bfloat16)
        check(gemm_kernel(x, weight), expected, jnp.bfloat16)
    assert set(dispatch.implementations()["split_matmul"]) == chosen


@pytest.mark.mosaic
def test_a_ring_without_room_is_refused(monkeypatch):
    """A chunk could not arrive while another is multiplied, and its copies would never start."""
    from jaxspec.pallas.matmul.gemm_kernel import GemmTiling

    chunk = 2 * 64 * (16 + 64)
    monkeypatch.setattr(device, "room", lambda blocks: 2 * chunk + 1000)
    x = jnp.zeros((16, 128), jnp.bfloat16)
    assert GemmTiling.of(x, 16, 1, 128, 1, reserved=1000).stages == 2
    assert GemmTiling.of(x, 16, 1, 64, 1, reserved=2000).stages == 1
    with pytest.raises(ValueError, match="room for 2 chunks of 10240 bytes.*room for 1"):
        GemmTiling.of(x, 16, 1, 128, 1, reserved=1001)

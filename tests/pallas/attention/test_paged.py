"""paged_attention and kv_write against float64 attention over a contiguous history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged import _unsupported, paged_attention, paged_attention_reference
from jaxspec.pallas.paging.kv_write import kv_write

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEADS, DIM = 2, 12, 4, 2, 6, 8
GARBAGE = [10**6, -5, 2**31 - 1, -(2**31)]

reference = jax.jit(paged_attention_reference, static_argnums=2)


def attention_oracle(queries, keys, values, first_position):
    """float64 causal attention of `queries` [n, heads, dim] standing at `first_position` on."""
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for token, head in np.ndindex(queries.shape[:2]):
        seen = first_position + token + 1
        scores = keys[:seen, head // group].astype(np.float64) @ queries[token, head]
        weights = np.exp((scores - scores.max()) / np.sqrt(queries.shape[2]))
        out[token, head] = weights / weights.sum() @ values[:seen, head // group]
    return out


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def gate_of(rng, shape, dtype=jnp.float32):
    """A gate for heads of this shape, with columns behind it that are none."""
    rows, width, heads, dim = shape
    return OutputGate(jnp.asarray(2 * normal(rng, rows * width, 2 * (heads + 1) * dim), dtype))


def store(rng, kv, layer, pages, length):
    """Random keys and values written at positions `0..length - 1` of the pages."""
    keys, values = normal(rng, length, KV_HEADS, DIM), normal(rng, length, KV_HEADS, DIM)
    place = np.arange(length)
    slots = pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
    kv = kv_write(kv, layer, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(slots, jnp.int32))
    return kv, keys, values


@pytest.mark.parametrize("width", [1, 4])
def test_paged_attention_equals_attention_over_the_history(width):
    rng = np.random.default_rng(width)
    kv = jnp.full((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.nan)  # what others left behind
    tables = np.zeros((4, 5), np.int32)
    tables[1, :3], tables[2, :5], tables[3, :2] = [4, 9, 2], [1, 11, 5, 3, 7], [6, 8]
    query_len = np.array([min(width, 3), width, 0, 1, width], np.int32)
    slots = np.array([1, 2, 3, 3, 10**6], np.int32)
    num_computed = np.array([8, 20 - width, 3, 0, -4], np.int32)
    history = []
    for row in (0, 1, 3):
        length = num_computed[row] + query_len[row]
        kv, keys, values = store(rng, kv, 1, tables[slots[row]], length)
        history.append((row, keys, values))
    queries = normal(rng, 5, width, HEADS, DIM)
    for row in range(5):
        queries[row, query_len[row] :] = np.nan
    indices = map(jnp.asarray, (tables, slots, num_computed, query_len))
    out = jax.jit(paged_attention, static_argnums=2)(jnp.asarray(queries), kv, 1, *indices)
    expected = np.zeros(queries.shape)
    for row, keys, values in history:
        real = query_len[row]
        expected[row, :real] = attention_oracle(
            queries[row, :real], keys, values, num_computed[row]
        )
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("longest", [1, 127, 128, 129, 256, 257, 400])
def test_the_longest_row_bounds_what_is_read_and_changes_nothing(longest):
    rng = np.random.default_rng(longest)
    page_size, pages = 16, 25
    pool = normal(rng, 1, 2, 1 + 2 * pages, page_size, KV_HEADS, DIM)
    tables = np.zeros((3, pages), np.int32)
    tables[1:] = 1 + rng.permutation(2 * pages).reshape(2, pages)
    queries = jnp.asarray(normal(rng, 3, 2, HEADS, DIM))
    slots, query_len = jnp.asarray([2, 0, 1], jnp.int32), jnp.asarray([1, 2, 1], jnp.int32)
    num_computed = jnp.asarray([longest - 1, 10**6, longest // 3], jnp.int32)
    operands = queries, jnp.asarray(pool), 0, jnp.asarray(tables), slots, num_computed, query_len
    out = jax.jit(paged_attention, static_argnums=2)(*operands)
    np.testing.assert_allclose(out, paged_attention_reference(*operands), atol=1e-6)


def test_a_gate_multiplies_what_was_attended():
    rng = np.random.default_rng(0)
    kv = jnp.asarray(normal(rng, LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    queries, gate = jnp.asarray(normal(rng, 2, 3, HEADS, DIM)), gate_of(rng, (2, 3, HEADS, DIM))
    indices = [
        jnp.asarray(x, jnp.int32) for x in ([[0, 0], [1, 2], [3, 4]], [1, 2], [2, 4], [3, 2])
    ]
    plain = paged_attention(queries, kv, 1, *indices)
    gated = jax.jit(paged_attention, static_argnums=2)(queries, kv, 1, *indices, gate)
    expected = gate(plain.reshape(6, HEADS, DIM)).reshape(plain.shape)
    np.testing.assert_allclose(gated, expected, atol=1e-6)
    with pytest.raises(ValueError, match="must have 6 rows"):
        paged_attention(queries, kv, 1, *indices, gate.split(5)[0])


def test_padding_is_inert_in_kv_write():
    rng = np.random.default_rng(0)
    kv = jnp.asarray(normal(rng, LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    slots = jnp.asarray([-1, 0, PAGE_SIZE - 1, PAGES * PAGE_SIZE, *GARBAGE], jnp.int32)
    noise = jnp.full((len(slots), KV_HEADS, DIM), jnp.nan)
    np.testing.assert_array_equal(kv_write(kv, 1, noise, noise, slots), kv)


def test_8_bit_pools_saturate_and_are_read_as_they_are():
    rng = np.random.default_rng(0)
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.float8_e4m3fn)
    edges = jnp.asarray([449, -1e9, np.inf, -np.inf, np.nan, 448, 2**-9, 1.0])
    for dtype in (jnp.float32, jnp.bfloat16):
        new = jnp.broadcast_to(edges, (1, KV_HEADS, DIM)).astype(dtype)
        pool = kv_write(kv, 1, new, -new, jnp.asarray([PAGE_SIZE], jnp.int32))
        kept = np.asarray(pool.astype(jnp.float32))[1, :, 1, 0, 0]
        want = [448, -448, 448, -448, np.nan, 448, 2**-9, 1.0]
        np.testing.assert_array_equal(kept, [want, np.negative(want)])
    tables = np.array([[0, 0, 0], [4, 9, 2], [1, 3, 5]], np.int32)
    for slot in (1, 2):
        kv, _, _ = store(rng, kv, 1, tables[slot], 12)
    queries = jnp.asarray(normal(rng, 3, 2, HEADS, DIM))
    indices = [jnp.asarray(x, jnp.int32) for x in (tables, [2, 0, 1], [10, 3, 5], [2, 2, 1])]
    run = jax.jit(paged_attention, static_argnums=2)
    wide = run(queries, kv.astype(jnp.float32), 1, *indices)
    np.testing.assert_allclose(run(queries, kv, 1, *indices), wide, atol=1e-6)


def test_a_layer_is_written_alone():
    rng = np.random.default_rng(0)
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    kv, keys, values = store(rng, kv, 1, np.array([3, 5]), 6)
    assert not np.any(kv[0])
    flat = np.asarray(kv[1]).reshape(2, PAGES * PAGE_SIZE, KV_HEADS, DIM)
    np.testing.assert_array_equal(flat[0, [12, 13, 14, 15, 20, 21]], keys)
    np.testing.assert_array_equal(flat[1, [12, 13, 14, 15, 20, 21]], values)
    assert np.count_nonzero(flat) == keys.size + values.size


def test_bfloat16_pools_keep_bfloat16_queries():
    kv = jnp.ones((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.bfloat16)
    queries = jnp.ones((1, 2, HEADS, DIM), jnp.bfloat16)
    one = jnp.ones(1, jnp.int32)
    out = paged_attention(queries, kv, 1, jnp.ones((2, 3), jnp.int32), one, one, 2 * one)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), np.ones(out.shape))


# The kernel. Rows: padding by slot, by length, by slots that are not there; the rest are real.
SLOTS = np.array([3, 0, 4, 10**6, -1, 1, 5, 2], np.int32)
REAL = (0, 5, 6, 7)


def kernel_case(shape, dtype, width, page_size, table, seed=0):
    """Operands with NaN in every padding token, in all that no row wrote, and in row 6's keys.

    Row 0 fills its table; row 5 begins; rows 6 and 7 end within a page. Entries of the tables that
    no row may use are out of range.
    """
    rng = np.random.default_rng(seed)
    capacity, pages = table * page_size, 4 * table + 1
    query_len = np.array([width, width, 0, width, width, 1, max(1, width - 1), width], np.int32)
    length = np.array([capacity, 5, 5, 5, 5, 1, capacity // 2 + 3, capacity - page_size - 7])
    num_computed = np.maximum(length - query_len, 0).astype(np.int32)
    tables = rng.choice(GARBAGE, size=(6, table)).astype(np.int32)
    free = list(1 + rng.permutation(pages - 1))
    kv = np.full((LAYERS, 2, pages, page_size, shape.kv_heads, shape.head_dim), np.nan, np.float32)
    for row in REAL:
        for page in range(-(-(num_computed[row] + query_len[row]) // page_size)):
            tables[SLOTS[row], page] = at = free.pop()
            end = min(page_size, num_computed[row] + query_len[row] - page * page_size)
            kv[1, :, at, :end] = normal(rng, 2, end, shape.kv_heads, shape.head_dim)
            if row == 6 and page == 0:
                kv[1, 0, at, 0] = np.nan
    queries = normal(rng, len(SLOTS), width, shape.heads, shape.head_dim)
    for row in range(len(SLOTS)):
        queries[row, query_len[row] if row in REAL else 0 :] = np.nan
    indices = [jnp.asarray(x) for x in (tables, SLOTS, num_computed, query_len)]
    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    return jnp.asarray(queries, wide), jnp.asarray(kv, dtype), indices


def check(run, queries, kv, indices, gate=None):
    """`run` is the reference, and 0 in padding rows and tokens."""
    expected = reference(queries, kv, 1, *indices)
    if gate is not None:
        shape = expected.shape
        expected = gate(expected.astype(jnp.float32).reshape(-1, *shape[2:])).reshape(shape)
        indices = *indices, gate
    expected = np.asarray(expected, np.float32)
    out = np.asarray(run(queries, kv, 1, *indices), np.float32)
    query_len = np.asarray(indices[3])
    for row in range(len(out)):
        real = query_len[row] if row in REAL else 0
        assert not np.any(out[row, real:])
        if row == 6:  # a key of its own is NaN
            assert np.isnan(out[row, :real]).all()
            continue
        # Weights are rounded to 16 bits before they meet the values.
        tolerance = 4e-6 if kv.dtype == jnp.float32 else 4 * float(jnp.finfo(jnp.bfloat16).eps)
        np.testing.assert_allclose(out[row, :real], expected[row, :real], atol=tolerance, rtol=0)


def interpreted(*plan, **params):
    """The op as its kernel in Mosaic's interpreter: positions of a tile, tiles, shares."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.attention.paged_block import Plan
    from jaxspec.pallas.attention.paged_kernel import attend

    options = {"plan": Plan(*plan), "interpret": plgpu.InterpretGPUParams(**params)}
    return lambda queries, kv, layer, *indices: attend(
        queries, kv, jnp.asarray(layer, jnp.int32), *indices, **options
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "width", "page_size", "table", "splits"),
    [
        (jnp.bfloat16, 4, 2, 64, 4, 16, 14, 1),
        (jnp.bfloat16, 4, 2, 64, 3, 24, 9, 2),
        (jnp.bfloat16, 2, 1, 128, 1, 64, 4, 3),
        (jnp.bfloat16, 16, 1, 64, 9, 16, 9, 1),  # several tiles of queries
        (jnp.bfloat16, 2, 1, 256, 2, 544, 1, 7),
        (jnp.bfloat16, 4, 1, 256, 4, 16, 9, 2),
        (jnp.bfloat16, 6, 1, 256, 4, 16, 9, 1),
        (jnp.bfloat16, 3, 1, 64, 2, 16, 9, 1),  # heads in pieces of two and of one
        (jnp.float8_e4m3fn, 4, 2, 64, 4, 16, 14, 1),
        (jnp.float8_e4m3fn, 6, 1, 128, 3, 24, 9, 2),
        (jnp.float8_e4m3fn, 16, 1, 64, 9, 16, 9, 1),  # several tiles of queries
        (jnp.float8_e4m3fn, 6, 1, 256, 6, 16, 9, 1),  # the last of them with fewer tokens
        (jnp.float8_e4m3fn, 6, 1, 256, 6, 16, 9, 2),  # tiles that are not full, to be merged
        (jnp.float8_e4m3fn, 2, 1, 256, 2, 544, 1, 7),
        (jnp.float32, 4, 2, 64, 3, 16, 9, 1),
        (jnp.float32, 2, 1, 128, 9, 24, 4, 2),  # several tiles of queries
        (jnp.float32, 4, 2, 256, 1, 64, 2, 3),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, heads, kv_heads, dim, width, page_size, table, splits
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    stages = 1 if dim == 256 and dtype == jnp.bfloat16 else 2
    run = interpreted(32 if dtype == jnp.float32 else 64, stages, splits, detect_races=True)
    shape = AttentionShape(heads, kv_heads, dim)
    case = kernel_case(shape, dtype, width, page_size, table)
    check(run, *case)
    assert not get_races().races_found
    check(run, *case, gate_of(np.random.default_rng(1), case[0].shape, case[0].dtype))
    assert not get_races().races_found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
@pytest.mark.parametrize("computed", GARBAGE)
def test_a_live_row_out_of_range_harms_no_other(dtype, computed):
    """It stands where no table reaches, with more tokens than there are."""
    queries, kv, indices = kernel_case(AttentionShape(2, 1, 64), dtype, 2, 16, 4)
    run = interpreted(32 if dtype == jnp.float32 else 64, 2, 2)
    want = run(queries, kv, 1, *indices)
    *tables_and_slots, num_computed, query_len = indices
    wild = num_computed.at[7].set(computed), query_len.at[7].set(2**31 - 1)
    out = run(queries, kv, 1, *tables_and_slots, *wild)
    np.testing.assert_array_equal(out[:7].astype(jnp.float32), want[:7].astype(jnp.float32))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
def test_a_query_beyond_float16_is_no_infinity_over_8_bits():
    """Where the key is 0 it would make a NaN."""
    shape = AttentionShape(2, 1, 64)
    queries, kv, indices = kernel_case(shape, jnp.float8_e4m3fn, 1, 16, 4)
    queries = queries.at[..., 0].set(1e6)
    kv = kv.at[:, 0, ..., 0].multiply(jnp.zeros((), kv.dtype))  # NaN stays
    check(interpreted(64, 2, 1), queries, kv, indices)


@pytest.mark.parametrize(
    ("blocks", "context", "head_dim", "itemsize", "queries", "plan"),
    [
        (16, 1312, 256, 2, 16, (64, 2, 8)),
        (32, 1312, 256, 2, 16, (64, 2, 4)),
        (2, 511, 256, 2, 16, (64, 2, 1)),
        (2, 1312, 256, 2, 16, (64, 2, 16)),
        (4, 32768, 256, 2, 16, (64, 2, 33)),
        (256, 1312, 256, 2, 16, (64, 1, 1)),  # two blocks on a multiprocessor
        (256, 1312, 256, 2, 24, (64, 1, 1)),
        (256, 1312, 256, 2, 25, (64, 2, 1)),  # their queries leave no room for a second block
        (256, 1312, 256, 1, 16, (64, 2, 1)),
        (256, 1312, 256, 4, 8, (32, 2, 1)),
        (64, 8192, 128, 2, 16, (64, 2, 4)),
        (8, 800, 64, 2, 16, (128, 2, 3)),
    ],
)
def test_a_row_is_shared_as_far_as_there_are_multiprocessors_and_positions(
    blocks, context, head_dim, itemsize, queries, plan
):
    from jaxspec.pallas.attention.paged_block import Plan
    from jaxspec.pallas.attention.paged_kernel import plan_for

    assert plan_for(blocks, context, head_dim, itemsize, queries) == Plan(*plan)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(("more", "splits"), [(4, 1), (4, 2), (5, 2)])
def test_gates_of_any_projection_are_taken(more, splits):
    """By XLA, where columns behind them are no whole heads; of shares, no whole fours."""
    queries, kv, indices = kernel_case(AttentionShape(2, 1, 64), jnp.bfloat16, 2, 16, 9)
    gate = gate_of(np.random.default_rng(0), queries.shape, jnp.bfloat16)
    gate = OutputGate(jnp.pad(gate.projected, ((0, 0), (0, more))))
    check(interpreted(64, 2, splits), queries, kv, indices, gate)


@pytest.mark.parametrize(
    ("dtype", "dim", "most"),
    [(jnp.bfloat16, 256, 64), (jnp.float8_e4m3fn, 256, 32), (jnp.float32, 256, 8)],
)
def test_heads_that_share_a_key_head_fit_in_a_tile(dtype, dim, most):
    wide = jnp.bfloat16 if dtype == jnp.float8_e4m3fn else dtype
    kv = jax.ShapeDtypeStruct((1, 2, 4, 16, 1, dim), dtype)
    queries = [jax.ShapeDtypeStruct((1, 1, heads, dim), wide) for heads in (most, most + 1)]
    assert _unsupported(queries[0], kv) is None
    assert f"{most + 1} heads that share a key head" in _unsupported(queries[1], kv)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype", "page_size", "table", "width"),
    [
        ("qwen3-8b", jnp.bfloat16, 16, 40, 4),
        ("qwen3.5-9b", jnp.bfloat16, 16, 40, 4),
        ("qwen3.5-27b", jnp.bfloat16, 544, 3, 3),
        ("qwen3.5-35b-a3b", jnp.bfloat16, 64, 9, 1),
        ("nemotron-3-nano", jnp.bfloat16, 64, 9, 9),
        ("llama-3.2-1b", jnp.bfloat16, 16, 40, 9),
        ("qwen3-8b", jnp.float8_e4m3fn, 16, 40, 4),
        ("qwen3.5-9b", jnp.float8_e4m3fn, 16, 40, 4),
        ("qwen3.5-27b", jnp.float8_e4m3fn, 544, 3, 9),
        ("nemotron-3-nano", jnp.float8_e4m3fn, 64, 9, 9),
        ("llama-3.2-1b", jnp.float8_e4m3fn, 24, 40, 1),
        ("qwen3-8b", jnp.float32, 16, 40, 4),
        ("qwen3.5-9b", jnp.float32, 544, 3, 9),
        ("llama-3.2-1b", jnp.float32, 64, 9, 1),
        # As short as that, a row is one block's, which gates and puts out itself.
        ("qwen3.5-9b", jnp.bfloat16, 16, 15, 4),
        ("qwen3.5-27b", jnp.bfloat16, 16, 15, 9),
        ("llama-3.2-1b", jnp.bfloat16, 16, 15, 4),
        ("llama-3.2-1b", jnp.float32, 16, 15, 4),
        ("qwen3.5-27b", jnp.float8_e4m3fn, 16, 15, 9),
        ("qwen3-8b", jnp.float8_e4m3fn, 16, 15, 4),
    ],
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(
    model, dtype, page_size, table, width
):
    dispatch._chosen.pop("paged_attention", None)
    run = jax.jit(paged_attention, static_argnums=2)
    case = kernel_case(ATTENTION[model], dtype, width, page_size, table, seed=width)
    check(run, *case)
    check(run, *case, gate_of(np.random.default_rng(1), case[0].shape, case[0].dtype))
    assert dispatch.implementations()["paged_attention"] == ("kernel",)

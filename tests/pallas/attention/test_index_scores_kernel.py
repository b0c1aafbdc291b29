"""The kernel of a token index's scores: interpreted, compiled for an H200, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, int32
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention import index_scores_kernel
from jaxspec.pallas.attention.token_index import TokenIndex, index_scores, index_scores_reference

OPTIMIZED = True  # as for a user
LAYER = 1


def case_of(heads, dim, width, page_size, table, lengths, seed=0):
    """An index, pages and last positions of rows with so many tokens; 0 is padding.

    NaN is in all that no row wrote, and in tokens that are padding: each row's last one but one.
    Operands are of few numbers, so sums are exact in any order.
    """
    rng = np.random.default_rng(seed)
    rows, pages = len(lengths), len(lengths) * table + 1
    free = list(1 + rng.permutation(pages - 1))
    keys = np.full((2, pages, page_size, dim), np.nan, np.float32)
    tables = np.zeros((rows, table), np.int32)
    queries = rng.integers(-1, 2, (rows, width, heads, dim)).astype(np.float32)
    weights = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], (rows, width, heads)).astype(np.float32)
    newest = np.full((rows, width), -1, np.int32)
    for row, length in enumerate(lengths):
        for first in range(0, length, page_size):
            tables[row, first // page_size] = page = free.pop()
            count = min(page_size, length - first)
            keys[LAYER, page, :count] = rng.integers(-1, 2, (count, dim))
        real = min(width, length)
        newest[row, :real] = np.arange(length - real, length)
        queries[row, real:], weights[row, real:] = np.nan, np.nan
    index = TokenIndex(
        jnp.asarray(queries, jnp.bfloat16),
        jnp.asarray(weights),
        jnp.asarray(keys, jnp.bfloat16),
        1,
    )
    return index, LAYER, int32(tables), int32(newest)


def check(case):
    index, layer, tables, newest = case
    run, reference = (
        jax.jit(functools.partial(f), static_argnums=1)
        for f in (index_scores, index_scores_reference)
    )
    found, expected = run(index, layer, tables, newest), reference(index, layer, tables, newest)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("heads", "dim", "width", "page_size", "table", "lengths"),
    [
        (16, 64, 2, 16, 14, (224, 0, 1, 130)),
        (64, 128, 1, 64, 8, (512, 70)),
        (64, 128, 6, 24, 12, (288, 3)),  # two blocks of three tokens
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, monkeypatch, heads, dim, width, page_size, table, lengths
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    kernel = functools.partial(index_scores_kernel.index_scores_kernel, interpret=interpreter)
    monkeypatch.setattr(index_scores_kernel, "index_scores_kernel", kernel)
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)
    check(case_of(heads, dim, width, page_size, table, lengths))
    assert not get_races().races_found


def test_lengths_out_of_range_are_clamped(interpreter):
    index, layer, tables, _ = case_of(16, 64, 1, 16, 4, (64, 64, 64, 64))
    operands = index.queries, index.weights, index.keys, jnp.int32(layer), tables
    run = functools.partial(index_scores_kernel.index_scores_kernel, interpret=interpreter)
    scores = np.asarray(run(*operands, int32(GARBAGE)))
    whole = np.asarray(index_scores_reference(index, layer, tables, int32([[63]] * 4)))
    np.testing.assert_array_equal(scores[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize(("rows", "width"), [(64, 1), (64, 4), (1, 64)])
def test_it_compiles_for_an_h200(h200, monkeypatch, capfd, rows, width):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(queries, weights, keys, pages, newest):
        index = TokenIndex(queries, weights, keys, 2048)
        return sum(index_scores(index, layer, pages, newest) for layer in range(2)), keys

    queries = array(rows, width, 64, 128, dtype=jnp.bfloat16)
    keys = array(2, 65536, 16, 128, dtype=jnp.bfloat16)
    indices = array(rows, 512, dtype=jnp.int32), array(rows, width, dtype=jnp.int32)
    operands = queries, array(rows, width, 64), keys, *indices
    compiled = compile_for(h200, monkeypatch, step, operands, donated=2)
    assert_lean(compiled, capfd.readouterr().out, keys)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 4, 64])
def test_on_a_gpu_the_kernel_equals_its_reference(width):
    dispatch._chosen.pop("index_scores", None)
    check(case_of(64, 128, width, 16, 300, (4800, 0, 1, 130, 2500)))
    assert dispatch.implementations()["index_scores"] == ("kernel",)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from races import assert_no_races
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.selection import sums_above, sums_above_reference
from jaxspec.pallas.selection.parts import PART

VOCAB = PART + 1028  # a second part, whose last tile overlaps the one before
INF = np.inf
sums = jax.jit(sums_above)


def operands(vocab=VOCAB, rows=5, limits=3):
    """Rows with ties, infinities and NaN; limits from -inf to beyond the largest, and NaN."""
    rng = np.random.default_rng(0)
    logits = np.float32(rng.normal(size=(rows, vocab)) * 3)
    logits[1] = rng.integers(-2, 3, vocab)
    logits[2, 7::3] = -INF
    logits[2, 5] = INF
    logits[3, 11] = np.nan
    largest = np.where(np.isnan(logits), -INF, logits).max(axis=1).astype(np.float32)
    bounds = np.float32(rng.normal(size=(rows, limits)))
    bounds[1] = [0.0, 2.0, 2.5]
    bounds[2] = [-INF, INF, np.nan]
    return logits, largest, bounds, np.arange(rows) % 2 == 1, np.arange(rows) != 4


def expected(logits, largest, limits, counts, wanted):
    """In float64, part by part."""
    starts = range(0, logits.shape[1], PART)
    out = np.zeros((len(logits), len(starts), limits.shape[1]))
    with np.errstate(invalid="ignore"):
        mass = np.exp(logits.astype(np.float64) - largest[:, None])
    added = np.where(counts[:, None] | (logits == largest[:, None]), 1.0, mass)
    for row, part, limit in np.ndindex(out.shape):
        columns = slice(starts[part], starts[part] + PART)
        is_above = logits[row, columns] >= limits[row, limit]
        out[row, part, limit] = added[row, columns][is_above].sum() if wanted[row] else 0.0
    return out


def assert_right(found, args):
    want = expected(*args)
    assert found.dtype == jnp.float32 and found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=2e-5)
    counts = args[3]
    np.testing.assert_array_equal(np.asarray(found)[counts], want[counts])


def test_the_op_is_the_definition():
    args = operands()
    assert_right(sums(*args), args)


def test_more_than_a_limit_never_sums_to_more():
    """A search relies on it, and float32 sums in one order have it."""
    logits, largest, _, counts, wanted = operands()
    limits = np.broadcast_to(np.linspace(-2, 2, 9, dtype=np.float32), (5, 9))
    found = np.asarray(sums(logits, largest, limits, counts, wanted)).sum(axis=1)
    assert (np.diff(found[:3], axis=1) <= 0).all()


@pytest.mark.parametrize("blocks", [1000, 5], ids=["a part a block", "a row a block"])
def test_the_kernel_is_the_definition_without_races(blocks, interpreter, monkeypatch):
    from jaxspec.pallas.selection import sums_above_kernel as file

    monkeypatch.setattr(file, "_BLOCKS", blocks)
    args = operands()
    file.sums_above_kernel.clear_cache()
    assert_right(file.sums_above_kernel(*args, interpret=interpreter), args)
    assert_no_races()


def test_it_compiles_for_an_h200(h200, monkeypatch, capfd):
    from jaxspec.pallas.selection.sums_above_kernel import sums_above_kernel

    args = array(256, 151_936), array(256), array(256, 15)
    flags = array(256, dtype=jnp.bool_), array(256, dtype=jnp.bool_)
    compiled = compile_for(h200, monkeypatch, sums_above_kernel, (*args, *flags))
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [VOCAB, 151_936])
def test_on_a_gpu_the_op_is_its_kernel_and_the_definition(vocab):
    args = operands(vocab)
    assert_right(sums(*args), args)
    assert dispatch.implementations()["sums_above"] == ("kernel",)
    np.testing.assert_allclose(sums_above_reference(*args), sums(*args), rtol=2e-5)

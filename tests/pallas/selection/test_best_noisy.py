import jax
import jax.numpy as jnp
import numpy as np
import pytest
from races import assert_no_races
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.selection import LastKept, best_noisy, best_noisy_reference
from jaxspec.pallas.selection.noise import RowKeys, gumbel, random_bits
from jaxspec.pallas.selection.parts import PART

VOCAB = PART + 1028  # a second part, whose last tile overlaps the one before
INF = np.inf
best = jax.jit(best_noisy)


def operands(vocab=VOCAB, rows=8):
    """Rows with ties, infinities, a bound and nothing to choose; the last one is not wanted."""
    rng = np.random.default_rng(0)
    scores = np.float32(rng.normal(size=(rows, vocab)) * 3)
    scores[1] = rng.integers(-2, 3, vocab)  # greedy: the first of many equals
    scores[2, 7::3] = -INF
    scores[3, vocab - 2] = INF
    scores[4] = rng.integers(-2, 3, vocab)  # and the kept ones end among equals
    scores[6] = -INF
    limits = np.full(rows, -INF, np.float32)
    limits[[0, 4, 5]] = 1.5, 2.0, scores[5].max()
    ids = np.full(rows, 2**31 - 1, np.int32)
    ids[4], ids[5] = vocab // 3, vocab
    keys = RowKeys(*rng.integers(0, 2**32, (2, rows), dtype=np.uint32))
    is_noisy = np.arange(rows) % 4 != 1
    return scores, keys, is_noisy, LastKept(limits, ids), np.arange(rows) != rows - 1


def expected(scores, keys, is_noisy, last, wanted):
    ids = np.arange(scores.shape[1])
    columns = RowKeys(*(jnp.asarray(key)[:, None] for key in keys))
    noise = np.asarray(gumbel(random_bits(columns, jnp.asarray(ids, jnp.uint32)[None, :])))
    limit, last_id = last.logit[:, None], last.id[:, None]
    kept = (scores > limit) | ((scores == limit) & (ids <= last_id))
    noisy = np.where(kept, scores + np.where(is_noisy[:, None], noise, 0.0), -INF)
    return np.where(wanted, noisy.argmax(axis=1), 0), noisy


def assert_right(found, args):
    want, noisy = expected(*args)
    found = np.asarray(found)
    assert found.dtype == np.int32
    for row, (got, column) in enumerate(zip(found, want, strict=True)):
        # Rounding of the noise may exchange two that are as good as equal.
        assert got == column or noisy[row, column] - noisy[row, got] < 1e-5, row
    assert found[1] == want[1] and found[3] == want[3] and found[5] == want[5]
    assert found[6] == 0 and found[-1] == 0


def test_the_op_is_the_definition():
    args = operands()
    assert_right(best(*args), args)


def test_no_id_after_the_last_kept_one_is_drawn():
    scores = np.zeros((4000, 600), np.float32)
    keys = RowKeys(*np.random.default_rng(1).integers(0, 2**32, (2, 4000), dtype=np.uint32))
    every = np.ones(4000, bool)
    last = LastKept(np.zeros(4000, np.float32), np.full(4000, 9, np.int32))
    counts = np.bincount(np.asarray(best(scores, keys, every, last, every)), minlength=600)
    assert counts[:10].sum() == 4000 and (np.abs(counts[:10] - 400) < 5 * np.sqrt(400)).all()


@pytest.mark.parametrize("blocks", [1000, 8], ids=["a part a block", "a row a block"])
def test_the_kernel_is_the_definition_without_races(blocks, interpreter, monkeypatch):
    from jaxspec.pallas.selection import best_noisy_kernel as file

    monkeypatch.setattr(file, "_BLOCKS", blocks)
    args = operands()
    file.best_noisy_kernel.clear_cache()
    assert_right(file.best_noisy_kernel(*args, interpret=interpreter), args)
    assert_no_races()


def test_it_compiles_for_an_h200(h200, monkeypatch, capfd):
    from jaxspec.pallas.selection.best_noisy_kernel import best_noisy_kernel

    key, flag = array(256, dtype=jnp.uint32), array(256, dtype=jnp.bool_)
    last = LastKept(array(256), array(256, dtype=jnp.int32))
    args = array(256, 151_936), RowKeys(key, key), flag, last, flag
    compiled = compile_for(h200, monkeypatch, best_noisy_kernel, args)
    assert_lean(compiled, capfd.readouterr().out)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [VOCAB, 151_936])
def test_on_a_gpu_the_op_is_its_kernel_and_the_definition(vocab):
    args = operands(vocab)
    assert_right(best(*args), args)
    assert dispatch.implementations()["best_noisy"] == ("kernel",)
    assert_right(best_noisy_reference(*args), args)

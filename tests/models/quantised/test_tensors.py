"""Transposed tensors: columns that are read ahead are those of the file, and few are kept."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from quantised_folders import packed, write_safetensors

from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.quantised import tensors
from jaxspec.models.quantised.tensors import (
    PackedColumns,
    PackedRows,
    ReadAhead,
    Rows,
    Shifted,
    Tensor,
    Transposed,
    per_word,
)

SHAPE = 24, 64


@pytest.fixture
def stored(tmp_path):
    """Ten matrices by name, and the open checkpoint with them."""
    rng = np.random.default_rng(0)
    held = {f"m{number}": rng.integers(-999, 999, SHAPE).astype(np.int32) for number in range(10)}
    write_safetensors(tmp_path / "model.safetensors", held)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        yield held, checkpoint


def kept_bytes(ahead):
    return sum(columns.nbytes for _, columns in vars(ahead._thread)["kept"].values())


@pytest.mark.parametrize("short", [0, 2**14])
def test_columns_in_any_order_are_those_of_the_file(stored, short, monkeypatch):
    monkeypatch.setattr(tensors, "_SHORT", short)
    monkeypatch.setattr(tensors, "_AHEAD", 7 * 4 * SHAPE[0])
    held, checkpoint = stored
    ahead, rng = ReadAhead(), np.random.default_rng(1)
    for _ in range(300):
        name = rng.choice(list(held))
        first = int(rng.integers(SHAPE[1]))
        count = int(rng.integers(1, SHAPE[1] - first + 1))
        found = Transposed(Tensor(checkpoint, name), ahead, SHAPE).rows(first, count)
        np.testing.assert_array_equal(found, held[name].T[first : first + count])
        assert kept_bytes(ahead) <= tensors._KEPT * 4 * SHAPE[0] * SHAPE[1]


def test_columns_of_a_stack_may_be_of_several_matrices(stored):
    held, checkpoint = stored
    stack = Transposed(Tensor(checkpoint, "m0"), ReadAhead(), (8, 64))
    columns = held["m0"].reshape(3, 8, 64).swapaxes(1, 2).reshape(-1, 8)
    for first, count in ((0, 192), (60, 8), (64, 64), (3, 130), (191, 1)):
        np.testing.assert_array_equal(stack.rows(first, count), columns[first : first + count])


def test_threads_read_ahead_for_themselves(stored):
    held, checkpoint = stored
    ahead = ReadAhead()

    def read(number):
        name = f"m{number % 10}"
        found = Transposed(Tensor(checkpoint, name), ahead, SHAPE).rows(number % 60, 4)
        return np.array_equal(found, held[name].T[number % 60 :][:4])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(400)))


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_in_words_of_rows_and_of_columns(bits, tmp_path):
    """As a row of a matrix has them, and as a column has; the last word may be partial."""
    rng, each = np.random.default_rng(0), per_word(bits)
    numbers = rng.integers(0, 2**bits, (21, 19))
    words = {"rows": packed(numbers, bits), "columns": packed(numbers.T, bits).T}
    write_safetensors(tmp_path / "model.safetensors", words)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        by_rows = Rows(Tensor(checkpoint, "rows"), words["rows"].shape[1])
        by_columns = Rows(Tensor(checkpoint, "columns"), 19)
        for first, count in ((0, 21), (5, 9), (20, 1), (7, 2)):
            expected = numbers[first : first + count]
            found = PackedRows(by_rows, bits, 19).rows(first, count)
            np.testing.assert_array_equal(found, expected)
            columns = PackedColumns(by_columns, bits, range(each))
            np.testing.assert_array_equal(columns.rows(first, count), expected)
            shifted = Shifted(columns, bits, 1).rows(first, count)
            np.testing.assert_array_equal(shifted, (expected + 1) % 2**bits)

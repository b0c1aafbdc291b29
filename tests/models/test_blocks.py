"""Blocks of a parameter: put together they are what NumPy makes of the placements."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.models.blocks import Source
from jaxspec.models.layers.parameters import Placement

RANDOM = np.random.default_rng(0)
QKVZ = [rows.ravel() for rows in np.split(np.arange(24).reshape(2, 12), [3, 6, 8], axis=1)]
# A parameter's shape, and its placements: name and shape of the tensor, and the other fields.
CASES = {
    "whole": ((7, 5), [("x", (7, 5), {})]),
    "vector": ((9,), [("x", (9,), {})]),
    "transposed": ((5, 7), [("x", (7, 5), {"transpose": True})]),
    "convolution": ((4, 10), [("x", (10, 1, 4), {"transpose": True})]),
    "reshaped": ((6, 4), [("x", (2, 3, 4), {})]),
    "side by side, with padding": (
        (12, 20),
        [
            ("q", (7, 12), {"transpose": True, "index": (..., slice(0, 7))}),
            ("k", (9, 12), {"transpose": True, "index": (..., slice(8, 17))}),
        ],
    ),
    "columns": ((7, 2), [("a", (7,), {"index": (..., 0)}), ("b", (7,), {"index": (..., 1)})]),
    "rows": ((2, 5), [("a", (5,), {"index": 0}), ("b", (5,), {"index": 1})]),
    "a stack and a wider expert": (
        (6, 8, 3),
        [
            ("fused", (4, 8, 3), {"index": slice(4)}),
            ("gate", (6, 3), {"index": (4, slice(0, 4)), "part": slice(0, 4)}),
            ("up", (6, 3), {"index": (4, slice(4, 8)), "part": slice(0, 4)}),
            ("gate", (6, 3), {"index": (5, slice(0, 2)), "part": slice(4, 6)}),
            ("up", (6, 3), {"index": (5, slice(4, 6)), "part": slice(4, 6)}),
        ],
    ),
    "one by one, in any order": (
        (5, 6, 4),
        [
            *((f"{i}", (6, 4), {"index": (i, slice(0, 6))}) for i in (3, 1, 0, 2)),
            ("wide", (6, 7), {"index": (4, ..., slice(3)), "part": (..., slice(4, 7))}),
        ],
    ),
    "interleaved": (
        (5, 24),
        [
            (
                "qkvz",
                (24, 5),
                {"transpose": True, "index": (..., slice(start, start + len(part))), "part": part},
            )
            for part, start in zip(QKVZ, (0, 6, 12, 16), strict=True)
        ],
    ),
    "with factors": (
        (5, 7),
        [
            ("a", (3, 5), {"transpose": True, "index": (..., slice(0, 3)), "scale": 0.3}),
            ("b", (4, 5), {"transpose": True, "index": (..., slice(3, 7))}),
        ],
    ),
    "every second row": ((4, 4), [("x", (8, 4), {"part": slice(0, 8, 2)})]),
    "an uneven choice of rows": ((5, 4), [("x", (9, 4), {"part": np.array([0, 1, 2, 5, 6])})]),
}


class Files:
    """Tensors of random numbers, read as `Checkpoint.read` does."""

    def __init__(self, shapes, dtypes=None):
        self.tensors = {name: RANDOM.normal(size=shape) for name, shape in shapes.items()}
        for name in shapes:
            self.tensors[name] = self.tensors[name].astype((dtypes or {}).get(name, np.float32))

    def read(self, name, first, into):
        assert into.dtype == self.tensors[name].dtype
        into[...] = self.tensors[name].reshape(-1)[first : first + into.size]

    def dtype_of(self, name):
        return self.tensors[name].dtype


def as_numpy_does(placements, files):
    param = placements[0].param
    value = np.zeros(param.shape, param.dtype)
    for each in placements:
        tensor = files.tensors[each.name][each.part]
        place = value[each.index].shape
        tensor = tensor if each.scale == 1.0 else np.float32(each.scale) * tensor.astype("float32")
        value[each.index] = (tensor.T if each.transpose else tensor).reshape(place)
    return value


def put_together(source, files, most):
    """What the blocks hold, each of which must be what its fields say."""
    content, shapes, size = np.full(source.shape, np.nan, source.dtype), set(), 0
    for block in source.blocks(most):
        into = np.full(block.size, np.nan, source.dtype)
        source.read(block, files.read, into)
        content.reshape(-1)[block.first : block.first + block.size] = into
        box = tuple(map(slice, block.start, np.add(block.start, block.shape)))
        np.testing.assert_array_equal(content[box], into.reshape(block.shape))
        assert into.nbytes <= max(most, source.dtype.itemsize)
        shapes.add(block.shape)
        size += block.size - block.repeated
    assert len(shapes) == 1, "one program writes them all"
    assert size == content.size
    return content.T if source.transpose else content


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_together_what_numpy_makes_of_the_placements(case):
    shape, parts = CASES[case]
    files = Files({name: size for name, size, _ in parts})
    param = types.SimpleNamespace(shape=shape, dtype=np.dtype(np.float32))
    placements = [Placement(name, size, param, **fields) for name, size, fields in parts]
    source = Source.of(placements, lambda name: name, files.dtype_of)
    for most in (1, 20, 64, 100, 200, 10**6):
        whole = put_together(source, files, most)
        np.testing.assert_array_equal(whole, as_numpy_does(placements, files))


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=3),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 300),
)
def test_a_part_of_any_tensor_goes_to_any_place(shape, margin, transpose, most):
    """The parameter is larger than the part by a margin on each side of each axis."""
    transpose = transpose and len(shape) == 2
    held = shape[::-1] if transpose else shape
    param = types.SimpleNamespace(
        shape=tuple(size + 2 * margin for size in held), dtype=np.dtype(np.float32)
    )
    placement = Placement(
        "x",
        tuple(size + margin for size in shape),
        param,
        transpose,
        index=tuple(slice(margin, margin + size) for size in held),
        part=tuple(slice(margin, None) for _ in shape),
    )
    files = Files({"x": placement.shape})
    source = Source.of([placement], lambda name: name, files.dtype_of)
    np.testing.assert_array_equal(
        put_together(source, files, most), as_numpy_does([placement], files)
    )


def test_tensors_of_unlike_dtypes_are_read_as_float32():
    param = types.SimpleNamespace(shape=(7, 2), dtype=np.dtype(np.float32))
    placements = [Placement(n, (7,), param, index=(..., i)) for i, n in enumerate("ab")]
    files = Files({"a": (7,), "b": (7,)}, {"a": np.float16})
    source = Source.of(placements, lambda name: name, files.dtype_of)
    assert source.dtype == np.float32
    np.testing.assert_array_equal(put_together(source, files, 16), as_numpy_does(placements, files))


def test_a_tensor_that_goes_to_one_place_is_one_run():
    """74,000 tensors are not many more runs."""
    param = types.SimpleNamespace(shape=(3, 8, 4), dtype=np.dtype(np.float32))
    placements = [
        Placement(f"{expert}.{name}", (4, 4), param, index=(expert, rows))
        for expert in range(3)
        for name, rows in {"gate": slice(0, 4), "up": slice(4, 8)}.items()
    ]
    source = Source.of(placements, str.upper, lambda _: np.dtype(np.float32))
    assert [(run.tensor, run.length) for run in source.runs] == [
        (placement.name.upper(), 16) for placement in placements
    ]


@pytest.mark.parametrize("transpose", [False, True])
def test_a_scaled_value_is_rounded_once_to_the_parameters_dtype(transpose):
    """The product is one of float32 numbers, whatever the file and the parameter hold."""
    bfloat16 = np.dtype(jnp.bfloat16)
    files = Files({"x": (6, 5)}, {"x": bfloat16})
    param = types.SimpleNamespace(shape=(5, 6) if transpose else (6, 5), dtype=bfloat16)
    placement = Placement("x", (6, 5), param, transpose).scaled(0.7).scaled(1.5)
    source = Source.of([placement], lambda name: name, files.dtype_of)
    (block,) = source.blocks(10**6)
    into = np.empty(block.size, bfloat16 if not transpose else source.dtype)
    source.read(block, files.read, into)
    expected = files.tensors["x"].astype(np.float32) * np.float32(0.7 * 1.5)
    np.testing.assert_array_equal(into.reshape(6, 5), expected.astype(into.dtype))

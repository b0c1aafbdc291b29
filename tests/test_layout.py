"""Fields of a packed array: where they lie, and their way in and out, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layout import Field, PackedLayout

MIXED = PackedLayout(
    [
        Field("a", "A scalar."),
        Field("b", "A float.", dtype=np.float32, shape=(3,)),
        Field("c", "A table.", shape=(2, 2)),
        Field("d", "Nothing.", shape=(0,)),
    ]
)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_fields_lie_end_to_end_and_share_nothing(lead):
    array = np.zeros((*lead, MIXED.size), np.int32)
    fields = MIXED.unpack(array)
    assert MIXED.size == 8
    for number, name in enumerate(["a", "b", "c"], 1):
        assert fields[name].shape == (*lead, *MIXED.shapes[name])
        fields[name].view(np.int32)[...] += number  # views: writing them writes the array
    expected = np.broadcast_to([1, 2, 2, 2, 3, 3, 3, 3], array.shape)
    np.testing.assert_array_equal(array, expected)


def test_floats_are_written_and_read_as_floats():
    array = np.zeros((2, MIXED.size), np.int32)
    values = np.array([[0.1, -0.0, 1e-45], [np.inf, 1 / 3, 3.4e38]], np.float32)
    MIXED.read(array, "b")[...] = values
    assert array[:, 1:4].tobytes() == values.tobytes()
    for read in (MIXED.read(array, "b"), MIXED.read(jnp.asarray(array), "b")):
        assert read.dtype == np.float32 and np.asarray(read).tobytes() == values.tobytes()


def test_bits_are_what_unpack_reads_back():
    random = np.random.default_rng(0)
    array = random.integers(-(2**31), 2**31, (4, MIXED.size), np.int32)
    fields = MIXED.unpack(array)
    parts = [MIXED.bits(name, value) for name, value in fields.items()]
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), array)


def test_drafts_and_emits_are_sized_by_the_number_of_drafts():
    fields = [Field("drafts", "K.", shape=("drafts",)), Field("tokens", "1 + K.", shape=("emits",))]
    assert PackedLayout(fields, 3).shapes == {"drafts": (3,), "tokens": (4,)}
    assert PackedLayout(fields).size == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("e", np.zeros(2, np.int32), KeyError),
        ("a", np.zeros(2, np.float32), ValueError),
        ("b", np.zeros((2, 3), np.int32), ValueError),
        ("b", np.zeros((2, 4), np.float32), ValueError),
    ],
)
def test_a_value_that_does_not_fit_its_field_is_refused(name, value, error):
    with pytest.raises(error, match=name):
        MIXED.bits(name, value)

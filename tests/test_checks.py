"""Values from outside: what counts as a number, how much is read of them, how they are shown."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jaxspec import checks
from jaxspec.checks import shown


class Unwritable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [3, "a'b", b"a", None, [1, "b", {"c": (2,)}], {"a": 1, "b": [2]}, (1,), {3}, [], np.int64(3)],
)
def test_a_short_value_is_shown_as_python_writes_it(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "a" * 10**7,
        b"a" * 10**7,
        10**10**5,
        [10**10**5],
        list(range(10**6)),
        dict.fromkeys(range(10**6)),
        [[[[[list(range(10**6))]]]]] * 10**5,
        np.zeros(10**6),
        Unwritable(),
        [Unwritable()],
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_shown_in_few_characters(value):
    assert 0 < len(shown(value)) <= 80 and len(shown(value, 30)) <= 30


def test_a_list_that_holds_itself_is_shown():
    value = []
    value += [value, value]
    assert shown(value) == "[[[..., ...], [..., ...]], [[..., ...], [..., ...]]]"


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_an_integer_is_kept_as_pythons(value):
    for kept in (checks.integer("x", value, 1), checks.seed_bits("x", value)):
        assert kept == 3 and type(kept) is int


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, np.array(3)])
def test_booleans_floats_and_arrays_are_no_integers(value):
    assert not checks.is_integer(value) and not checks.are_integers([1, value])
    with pytest.raises(ValueError, match="x must be an integer of at least 1, got "):
        checks.integer("x", value, 1)
    with pytest.raises(ValueError, match="x must be an integer that fits in 64 bits, got "):
        checks.seed_bits("x", value)


def test_integers_have_bounds():
    assert checks.integer("x", 5, 5, 5) == 5 and checks.seed_bits("x", -(2**63)) == -(2**63)
    for value in (4, -(10**400)):
        with pytest.raises(ValueError, match="at least 5, got "):
            checks.integer("x", value, 5)
    for value in (6, 10**400, 10**5000):
        with pytest.raises(ValueError, match="x must be at most 5, got .*; a hint.$"):
            checks.integer("x", value, 1, 5, "; a hint")
    for value in (2**64, -(2**63) - 1, 10**5000):
        with pytest.raises(ValueError, match="fits in 64 bits"):
            checks.seed_bits("x", value)


@pytest.mark.parametrize("value", [0.5, Fraction(1, 2), np.float16(0.5), np.float64(0.5)])
def test_a_number_is_kept_as_pythons_float(value):
    assert checks.real(value) == 0.5 and type(checks.real(value)) is float


@pytest.mark.parametrize("value", [True, np.True_, "0.5", None, 1j, np.array(0.5), [0.5]])
def test_what_is_no_number_lies_in_no_range(value):
    assert math.isnan(checks.real(value))


def test_a_number_beyond_all_floats_is_infinite():
    assert checks.real(10**400) == math.inf


def test_true_and_false_are_those_of_python_and_numpy():
    assert checks.boolean("x", np.True_) is True and checks.boolean("x", False) is False
    for value in (1, "yes", None):
        with pytest.raises(ValueError, match="x must be True or False, got "):
            checks.boolean("x", value)


def test_no_more_is_read_than_asked_for():
    assert checks.items(itertools.count(), 3) == [0, 1, 2, 3]
    assert checks.items(range(10**12), 1) == [0, 1]
    assert checks.items(np.arange(2), 9) == [0, 1] == checks.items((i for i in range(2)), 9)
    for value in ("ab", b"ab", bytearray(2), {1: 2}, {1}, 3, None, np.array(3)):
        assert checks.items(value, 9) is None


def test_a_path_is_one_that_a_file_system_can_look_up(tmp_path):
    assert checks.path("x", tmp_path) == tmp_path and checks.path("x", "a/b") == "a/b"
    for value in ("", "a\0b", "\ud800", "a" * 5000, Path("a" * 5000)):
        with pytest.raises(ValueError, match="x must be a path of 1 to 4,096 characters"):
            checks.path("x", value)
    for value in (3, None, b"a", ["a"]):
        with pytest.raises(ValueError, match="x must be a text or a Path, got "):
            checks.path("x", value)

"""Names of trees of every kind, and what is no tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES

from jaxspec.models import unread
from jaxspec.models.trees.checkpoint import TreeCheckpoint, named_arrays

ONE = np.arange(6, dtype=np.float32).reshape(2, 3)


class Imported:
    """An array of another library."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


TREES = {
    "flat": {"a.b": ONE, "a.1": ONE},
    "nested": {"a": {"b": ONE, 1: ONE}},
    "items": {"a.b": ONE, "a.1": ONE}.items(),
    "iterator": iter([("a.b", ONE), ("a.1", jnp.asarray(ONE))]),
    "dlpack": {"a.b": Imported(ONE), "a.1": ONE},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_have_names(tree):
    found = named_arrays("weights", tree)
    assert sorted(found) == ["a.1", "a.b"]
    for array in found.values():
        np.testing.assert_array_equal(array, ONE)


@pytest.mark.parametrize("given", [lambda array: array, Imported], ids=["numpy", "dlpack"])
def test_arrays_of_an_iterator_may_be_written_to_by_the_next_pair(given):
    memory = np.zeros(1024 + 16, np.float32)
    first = -memory.ctypes.data % 64 // 4
    buffer = memory[first : first + 1024]  # JAX shares aligned memory

    def pairs():
        for number in range(2):
            buffer[...] = number
            yield str(number), given(buffer)

    assert [each[0] for each in named_arrays("weights", pairs()).values()] == [0, 1]


def test_a_state_has_the_names_of_own_leaves():
    with unread(FIXTURES / "qwen3", jnp.dtype("float32")) as found:
        state = nnx.state(found.read())
        assert named_arrays("weights", state).keys() == found.layout.own_specs.keys()


def test_parts_are_read_in_order():
    checkpoint = TreeCheckpoint({"a": ONE, "b": jnp.asarray(ONE)})
    for name in ("a", "b", "a"):
        for first in (0, 2):
            into = np.empty(3, np.float32)
            checkpoint.read(name, first, into)
            np.testing.assert_array_equal(into, ONE.ravel()[first : first + 3])
    assert checkpoint.bytes_by_type() == {"F32": 48}


NONE = {
    "empty": {},
    "number": 3,
    "text": "weights",
    "array": ONE,
    "names": [("a", ONE, 1)],
    "no name": {3: ONE},
    "list": {"a": [1.0]},
    "nothing": {"a": None},
    "twice": [("a", ONE), ("a", ONE)],
}


@pytest.mark.parametrize("tree", NONE.values(), ids=NONE)
def test_what_is_no_tree_is_refused(tree):
    with pytest.raises(ValueError, match="weights"):
        named_arrays("weights", tree)


def test_tracers_are_refused():
    with pytest.raises(ValueError, match="jit"):
        jax.jit(lambda x: named_arrays("weights", {"a": x}))(ONE)

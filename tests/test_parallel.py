"""Groups of devices, and their collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import parallel
from jaxspec.parallel import Group

pytestmark = pytest.mark.devices
PAIR = Group(2)


def test_one_device_runs_the_function_itself():
    def function(x):
        return parallel.gather(parallel.reduce(x), axis=0) + parallel.first_of(3)

    assert Group().on_each(function) is function
    assert function(jnp.ones(2)).tolist() == [1.0, 1.0]


def test_each_device_gets_its_part_and_all_get_the_whole():
    def function(parts, whole):
        return parts + whole, parallel.reduce(parts), parallel.gather(parts, axis=0)

    parts = jnp.arange(4, dtype=jnp.float32)
    on_each = jax.jit(PAIR.on_each(function, whole=1, equal=(False, True, True)))
    added, summed, gathered = on_each(parts, jnp.array([10.0, 20.0]))
    assert added.tolist() == [10.0, 21.0, 12.0, 23.0]
    assert summed.tolist() == [2.0, 4.0]
    assert gathered.tolist() == parts.tolist()


def test_stacked_arrays_are_those_of_the_devices():
    arrays = [jax.device_put(jnp.full((2, 3), rank), PAIR.devices[rank]) for rank in range(2)]
    stacked = PAIR.stacked(arrays)
    assert stacked.shape == (4, 3)
    np.testing.assert_array_equal(np.asarray(stacked)[:, 0], [0, 0, 1, 1])
    firsts = jax.jit(PAIR.on_each(lambda x: parallel.first_of(5) + x[:1, 0]))(stacked)
    assert firsts.tolist() == [0, 6]


def test_local_shapes_are_those_of_one_device():
    like = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    found = PAIR.local(lambda x: (parallel.scatter(x, axis=1), jnp.int32(1)), like)
    assert [leaf.shape for leaf in found] == [(3, 2), ()]


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel_size.*got 99.*CUDA_VISIBLE_DEVICES"):
        Group.of(99)

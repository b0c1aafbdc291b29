"""Tensor parallelism: a group of devices that run one program, and its collectives.

A program of n devices is one `jax.shard_map`. Inside it, every array has the shape that one device
holds, and the model is built from `ModelConfig.local(n)`. Layers call `reduce` and `gather` where
devices have partial sums or parts of a result. Without a group these return their argument, so the
programs of one device are unchanged.

Outside the program, an array of a group is the arrays of its devices side by side along the first
axis, whatever that axis means. A replicated array is there n times; a scalar is one.

Devices decide only on gathered values, which are the same bits everywhere: sums of a reduction may
differ in the last bit between devices, and rows would drift apart.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec import device

AXIS = "tensor"  # name of the mesh axis


@dataclasses.dataclass(frozen=True)
class Group:
    """The first `size` devices of the default device's platform."""

    size: int = 1

    @staticmethod
    def of(size: int) -> "Group":
        """Return a group of `size` devices.

        Raises:
            ValueError: There are fewer devices.
        """
        there = len(_local_devices())
        if size > there:
            raise ValueError(
                f"tensor_parallel_size must be at most the number of devices that JAX sees, got "
                f"{size} with {there}. Lower it, or make more visible (CUDA_VISIBLE_DEVICES on "
                "GPUs, JAX_NUM_CPU_DEVICES on a CPU)."
            )
        return Group(size)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, in the order of their ranks; the default device alone without a group."""
        if self.size == 1:
            return (device.default_device(),)
        return tuple(_local_devices()[: self.size])

    def default(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        """Make a device the default one; without a group the default stays."""
        if self.size == 1:
            return contextlib.nullcontext()
        return jax.default_device(self.devices[rank])

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.devices, (AXIS,))

    @property
    def _traced(self) -> Mesh | AbstractMesh:
        """The mesh, or one without devices if this process only traces or has fewer devices."""
        only_traces = isinstance(device.default_device(), device.StandIn)
        if only_traces or len(self.devices) < self.size:
            return AbstractMesh((self.size,), (AXIS,))
        return self.mesh

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of a group's arrays."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @property
    def whole(self) -> NamedSharding:
        """Sharding of arrays that every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def on_each(
        self, function: Callable[..., Any], *, whole: int | None = None, equal: Any = None
    ) -> Callable[..., Any]:
        """Return `function` for the arrays of the group, run by each device on its own.

        Args:
            function: Takes and returns pytrees of arrays as one device holds them.
            whole: Index of an argument that every device gets whole; None if there is none.
            equal: Prefix tree of the results: True for those that are equal on all devices, of
                which the group returns one. None means scalars.
        """
        if self.size == 1:
            return function

        @functools.wraps(function)
        def mapped(*args: Any) -> Any:
            ways = tuple(
                _spec(True) if number == whole else jax.tree.map(_spec_of, arg)
                for number, arg in enumerate(args)
            )
            if equal is None:
                own = [arg if n == whole else self._local(arg) for n, arg in enumerate(args)]
                results = jax.tree.map(_spec_of, jax.eval_shape(function, *own))
            else:
                results = jax.tree.map(_spec, equal)
            call = jax.shard_map(
                function, mesh=self._traced, in_specs=ways, out_specs=results, check_vma=False
            )
            return call(*args)

        return mapped

    def stacked(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the group's array of the devices' arrays, which are given by rank; no copy."""
        shape = self.size * arrays[0].shape[0], *arrays[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, list(arrays))

    def like(self, local: Any) -> Any:
        """Return the shapes and dtypes of a group's arrays, given those of one device's."""
        return local if self.size == 1 else jax.tree.map(self._like, local)

    def local(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the shapes and dtypes of the results of `function` on one device.

        `args` have the shapes of one device.
        """
        found = jax.eval_shape(self.on_each(function), *self.like(args))
        return found if self.size == 1 else self._local(found)

    def _like(self, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (self.size * leaf.shape[0], *leaf.shape[1:]) if leaf.shape else ()
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    def _local(self, arrays: Any) -> Any:
        """Return the shapes and dtypes that one device has of the group's arrays."""

        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (leaf.shape[0] // self.size, *leaf.shape[1:]) if leaf.shape else ()
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        return jax.tree.map(one, arrays)


ALONE = Group()
"""The default device, without a group."""


def _local_devices() -> list[Any]:
    return jax.local_devices(backend=device.default_device().platform)


def _spec_of(leaf: Any) -> PartitionSpec:
    return _spec(leaf.ndim == 0)


def _spec(is_whole: bool) -> PartitionSpec:
    return PartitionSpec() if is_whole else PartitionSpec(AXIS)


# Inside a program


def in_group() -> bool:
    """Return True while a group's program is traced."""
    return AXIS in jax.sharding.get_abstract_mesh().axis_names


def size() -> int:
    """Return the number of devices of the group; 1 without one."""
    return jax.lax.axis_size(AXIS) if in_group() else 1


def reduce(parts: Float[Array, "*parts features"]) -> Float[Array, "*parts features"]:
    """Return the sum over all devices."""
    return jax.lax.psum(parts, AXIS) if in_group() else parts


def mean(parts: Float[Array, "*shape"], devices: int) -> Float[Array, "*shape"]:
    """Return the mean over each `devices` consecutive devices."""
    count = size()
    groups = [list(range(first, first + devices)) for first in range(0, count, devices)]
    return jax.lax.psum(parts, AXIS, axis_index_groups=groups) / devices


def gather(part: Array, axis: int) -> Array:
    """Return the arrays of all devices along `axis`, by rank: the same bits on each device."""
    return jax.lax.all_gather(part, AXIS, axis=axis, tiled=True) if in_group() else part


def scatter(parts: Array, axis: int) -> Array:
    """Return this device's part along `axis` of the sum over all devices."""
    if not in_group():
        return parts
    return jax.lax.psum_scatter(parts, AXIS, scatter_dimension=axis, tiled=True)


def first_of(count: int) -> Int[Array, ""] | int:
    """Return the index of this device's first entry, if each device holds `count` entries."""
    return jax.lax.axis_index(AXIS).astype(jnp.int32) * count if in_group() else 0

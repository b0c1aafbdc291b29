"""Tensor parallelism: a group of devices that run one program, and its collectives.

A program of n devices is one `jax.shard_map`. Inside it, every array has the shape that one device
holds, and the model is built from `ModelConfig.local(n)`. Layers call `reduce` and `gather` where
devices have partial sums or parts of a result. Without a group these return their argument, so the
programs of one device are unchanged.

Outside the program, an array of a group is the arrays of its devices side by side along the first
axis, whatever that axis means. A replicated array is there n times; a scalar is one.

The devices may be those of several processes (`runner/nodes.py`), which run the same programs in
the same order. Each process holds the parts of its devices.

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
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec import device

AXIS = "tensor"  # name of the mesh axis


@dataclasses.dataclass(frozen=True)
class Group:
    """The first devices of the default device's platform, the same number of each node.

    A node is a process of `jax.distributed`; arrays of the group have parts on all nodes.
    """

    size: int = 1
    nodes: int = 1

    @staticmethod
    def of(size: int, nodes: int = 1) -> "Group":
        """Return a group of `size` devices.

        Raises:
            ValueError: There are fewer devices, or devices of several kinds.
        """
        group = Group(size, nodes)
        if size == 1:
            return group
        for rank, there in enumerate(_devices_of_nodes(nodes)):
            if len(there) < size // nodes:
                where = f" on node {rank}, of {size // nodes} that it needs" if nodes > 1 else ""
                raise ValueError(
                    f"tensor_parallel_size must be at most the number of devices that JAX sees, "
                    f"got {size} with {len(there)}{where}. Lower it, or make more visible "
                    "(CUDA_VISIBLE_DEVICES on GPUs, JAX_NUM_CPU_DEVICES on a CPU)."
                )
        kinds = sorted({there.device_kind for there in group.devices})
        if len(kinds) > 1:
            raise ValueError(
                f"All devices of a group must be of one kind, got {' and '.join(kinds)}. Make "
                "those of one kind visible (CUDA_VISIBLE_DEVICES)."
            )
        return group

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, in the order of their ranks; the default device alone without a group."""
        if self.size == 1:
            return (device.default_device(),)
        each = self.size // self.nodes
        return tuple(there for of_node in _devices_of_nodes(self.nodes) for there in of_node[:each])

    @property
    def own_ranks(self) -> range:
        """Ranks of the devices of this node."""
        each = self.size // self.nodes
        first = each * jax.process_index() if self.nodes > 1 else 0
        return range(first, first + each)

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
            return AbstractMesh((self.size,), (AXIS,), axis_types=(AxisType.Auto,))
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
        """Return the group's array of the arrays of this node's devices, by rank; no copy."""
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


_STAND_INS = 64  # most devices of a group that a process without any traces for


def _devices_of_nodes(count: int) -> list[list[Any]]:
    """Return the devices of each node, this process alone without nodes."""
    default = device.default_device()
    if isinstance(default, device.StandIn):
        return [[default] * _STAND_INS] * count
    platform = default.platform
    if count == 1:
        return [jax.local_devices(backend=platform)]
    found = jax.devices(platform)
    return [[there for there in found if there.process_index == rank] for rank in range(count)]


def _spec_of(leaf: Any) -> PartitionSpec:
    return _spec(leaf.ndim == 0)


def _spec(is_whole: bool) -> PartitionSpec:
    return PartitionSpec() if is_whole else PartitionSpec(AXIS)


def held(
    whole: Sequence[int], local: Sequence[int], rank: int, devices: int
) -> Int[np.ndarray, " indices"]:
    """Return the indices along an axis that a device holds.

    An axis has segments, such as queries, keys and values, and each is shared: equally, or each
    entry goes to several consecutive devices if there are fewer entries than devices.

    Args:
        whole: Sizes of the segments.
        local: Sizes of the parts of the segments that each device holds.
        rank: Number of the device.
        devices: Number of devices.
    """
    indices, start = [], 0
    for size, own in zip(whole, local, strict=True):
        pieces = size // own
        first = start + rank * pieces // devices * own
        indices.append(np.arange(first, first + own))
        start += size
    return np.concatenate(indices)


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

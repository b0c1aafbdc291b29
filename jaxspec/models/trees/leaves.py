"""Programs that make a parameter of the tensors that fill it, on the device of the parameter.

Programs are named by the parts of tensors that they place, so that layers of one kind share them.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers.parameters import Picked, Placement, box
from jaxspec.models.trees.checkpoint import Tensor

_Indices = range | tuple[int, ...]  # along an axis; they can be hashed


class Part(NamedTuple):
    """A part of a tensor, and its target in the parameter."""

    source: tuple[_Indices, ...]
    target: tuple[_Indices, ...]
    transpose: bool
    scale: float

    @staticmethod
    def of(placement: Placement, shape: tuple[int, ...]) -> "Part":
        """Return the part of a placement in a parameter of this shape."""
        source = tuple(map(_indices, box(placement.shape, placement.part)))
        target = tuple(map(_indices, box(shape, placement.index)))
        return Part(source, target, placement.transpose, placement.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the target."""
        return tuple(map(len, self.target))

    def of_tensor(self, tensor: jax.Array, dtype: np.dtype) -> jax.Array:
        """Return the values for the target; they are rounded once."""
        values = _picked(tensor, self.source)
        if self.transpose:
            values = values.T
        if self.scale != 1.0:
            values = values.astype(jnp.float32) * jnp.float32(self.scale)
        return values.astype(dtype).reshape(self.shape)


class Leaf(NamedTuple):
    """A parameter and the parts that fill it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Part, ...]

    @property
    def is_one_part(self) -> bool:
        """True if one part is the whole parameter."""
        return self.parts[0].shape == self.shape

    def of(
        self, tensors: Sequence[Tensor], device: Any, base: jax.Array | None = None
    ) -> jax.Array:
        """Return the parameter's value on a device; it shares no memory with its arguments.

        Args:
            tensors: The tensor of each part, on the device.
            device: The device.
            base: Value where no part is; None means zeros.
        """
        return self.compiled(tensors, device, has_base=base is not None)(base, *tensors)

    def compiled(
        self, tensors: Sequence[Tensor], device: Any, *, has_base: bool
    ) -> jax.stages.Compiled:
        """Return the program for tensors of these shapes and dtypes; it is compiled once."""
        kinds = tuple((tuple(each.shape), np.dtype(each.dtype)) for each in tensors)
        return _compiled(self, kinds, device, has_base=has_base)


def after(tensors: Sequence[Tensor], value: jax.Array) -> jax.Array:
    """Return a value of tensors once those on the host have been read: they may be written to."""
    if any(isinstance(each, np.ndarray) for each in tensors):
        value.block_until_ready()
    return value


def await_copies(leaves: Iterable[jax.Array]) -> None:
    """Wait until leaves are computed: tensors of DLPack may be written to then."""
    jax.block_until_ready(list(leaves))


def near(tensor: Tensor, device: Any) -> jax.Array:
    """Return the tensor on a device; it may share its memory, and its copy may be in flight."""
    if not isinstance(tensor, np.ndarray) and tensor.devices() == {device}:
        return tensor
    return jax.device_put(tensor, device)


@functools.lru_cache(4096)
def _compiled(
    leaf: Leaf, kinds: tuple[tuple[tuple[int, ...], np.dtype], ...], device: Any, *, has_base: bool
) -> jax.stages.Compiled:
    base = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if has_base else None
    with jax.default_device(device):
        tensors = (jax.ShapeDtypeStruct(*kind) for kind in kinds)
        return jax.jit(functools.partial(_filled, leaf)).lower(base, *tensors).compile()


def _filled(leaf: Leaf, base: jax.Array | None, *tensors: jax.Array) -> jax.Array:
    if leaf.is_one_part:
        (part,), (tensor,) = leaf.parts, tensors
        return jnp.array(part.of_tensor(tensor, leaf.dtype), copy=True)
    value = jnp.zeros(leaf.shape, leaf.dtype) if base is None else base
    for part, tensor in zip(leaf.parts, tensors, strict=True):
        values = part.of_tensor(tensor, leaf.dtype)
        if all(map(_is_run, part.target)):
            starts = [indices[0] for indices in part.target]
            value = jax.lax.dynamic_update_slice(value, values, starts)
        else:
            value = value.at[np.ix_(*map(np.asarray, part.target))].set(values)
    return value


def _is_run(indices: _Indices) -> bool:
    return isinstance(indices, range) and indices.step == 1


def _indices(picked: Picked) -> _Indices:
    return picked if isinstance(picked, range) else tuple(picked.tolist())


def _picked(tensor: jax.Array, source: Sequence[_Indices]) -> jax.Array:
    for axis, indices in enumerate(source):
        if isinstance(indices, range):
            start, stop, step = indices.start, indices.stop, indices.step
            tensor = jax.lax.slice_in_dim(tensor, start, stop, step, axis)
        else:
            tensor = jnp.take(tensor, np.asarray(indices, np.int32), axis=axis)
    return tensor


@functools.partial(jax.jit, static_argnums=1)
def copied(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a copy in a dtype, on the same devices."""
    return jnp.array(value.astype(dtype), copy=True)


@jax.jit
def is_finite(tensor: jax.Array) -> jax.Array:
    """Return whether all numbers are finite."""
    return jnp.isfinite(tensor).all()

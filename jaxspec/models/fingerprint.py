"""Fingerprint of a model: its architecture, weights and dtype."""

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jaxspec import parallel
from jaxspec.models.checkpoint_module import CheckpointModule, ModelSpec
from jaxspec.models.layers.moe import sharing_experts
from jaxspec.models.layers.parameters import Placement, box
from jaxspec.models.layers.weight_matrix import stored
from jaxspec.models.shards import shards
from jaxspec.parallel import ALONE, Group

_COVERED = {"abc", "builtins", "flax", "jaxspec", "typing"}  # packages without digests of sources
_Axis = tuple[Int[np.ndarray, " values"], Int[np.ndarray, " values"]]
_Region = list[_Axis]
"""Values of an array: by axis, their indices on one device and in the whole model."""


class _Places(NamedTuple):
    """Indices of a device's values in the whole model, region by region."""

    is_used: Bool[np.ndarray, "devices regions"]
    by_axis: tuple[Int[np.ndarray, "devices regions indices"], ...]  # -1 outside of the region


def fingerprint(
    model_spec: ModelSpec,
    weights: Sequence[Array],
    group: Group = ALONE,
    *,
    is_deterministic: bool = False,
) -> str:
    """Return 64 hexadecimal digits that are equal for engines with the same model.

    They are the SHA-256 of the model's configuration, the shapes and dtypes of its weights, and a
    checksum of all values of each weight and their places, all as on a single device, and of
    whether activations are rounded and the engine is deterministic. A change of one value changes
    the fingerprint. Weights in 8 or 4 bits have another one than the same weights dequantised.
    Classes of other packages count by their names and sources, because others may compute something
    else from the same weights. Engine sizes, the number of devices and separately loaded drafters
    are not included.

    Waits for the devices.

    Args:
        model_spec: Spec of the model, with the sizes of one device.
        weights: Its weights, in the order of `ModelSpec.weights_of`.
        group: The devices that share the model.
        is_deterministic: The engine is; other engines compute keys and values with other bits.
    """
    whole = model_spec.whole.model()
    leaves = ModelSpec.weights_of(whole)
    digest = hashlib.sha256(repr(sharing_experts(whole.config, None)).encode())
    digest.update(repr([(leaf.shape, leaf.dtype.name) for leaf in leaves]).encode())
    digest.update("".join(_foreign_sources(whole)).encode())
    if any(form is not None and form.terms == 1 for form in model_spec.forms):
        digest.update(b"activations are rounded")
    if is_deterministic:
        digest.update(b"deterministic")
    places = _places_of(model_spec, group.size)
    checksum = _checksums(group, group.devices)
    for each in zip(weights, places, strict=True):  # a program per shape, and one sum at a time
        digest.update(np.asarray(checksum(*each)).tobytes())
    return digest.hexdigest()


def _foreign_sources(model: CheckpointModule) -> list[str]:
    """Return the names and sources of the model's classes that are of other packages.

    Classes without a source, such as those of an interactive session, have a name alone.
    """
    kinds = {kind for _, module in nnx.iter_modules(model) for kind in type(module).__mro__}
    found = []
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in _COVERED:
            source = ""
            with contextlib.suppress(OSError, TypeError):
                source = inspect.getsource(kind)
            found.append(f"{kind.__qualname__}\0{source}\0")
    return sorted(found)


@functools.lru_cache(8)
def _checksums(group: Group, devices: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the program of a group with these devices; it serves updated weights again."""
    return jax.jit(group.on_each(_checksum, whole=1, equal=True))


@functools.lru_cache(8)
def _places_of(model_spec: ModelSpec, devices: int) -> list[_Places]:
    return _places(model_spec.whole.model(), model_spec.model(), devices)


def _checksum(weight: Array, places: _Places) -> Array:
    """Return the sum of the mixed bits of all values, each times an odd number of its place.

    A change of one value changes the sum, and any other does except with a chance of 2^-32.
    """
    if jnp.issubdtype(weight.dtype, jnp.floating):  # exact for 32 bits and fewer
        bits = jax.lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.uint32)
    else:
        bits = weight.astype(jnp.uint32)
    own = jax.tree.map(lambda of_devices: of_devices[parallel.first_of(1)], places)
    total = jnp.uint32(0)
    for region, is_used in enumerate(own.is_used):
        number, is_counted = jnp.uint32(0), is_used
        for axis, indices in enumerate(own.by_axis):
            shape = [1] * weight.ndim
            shape[axis] = weight.shape[axis]
            index = indices[region].reshape(shape)
            number = _mixed(number + (index + 1).astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
            is_counted &= index >= 0
        terms = jnp.where(is_counted, _mixed(bits) * (number | 1), 0)
        total += jnp.sum(terms, dtype=jnp.uint32)
    return parallel.reduce(jax.lax.bitcast_convert_type(total, jnp.int32))


def _mixed(bits: Array) -> Array:
    """Return MurmurHash3's mix of 32 bits, which maps 0 to 0 and is reversible."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _places(whole: CheckpointModule, local: CheckpointModule, devices: int) -> list[_Places]:
    """Return the places of each leaf's values; a value that devices share is in one region."""
    leaves = ModelSpec.weights_of(local)
    of_all, of_one = list(whole.checkpoint()), list(local.checkpoint())
    numbers = {id(leaf): number for number, leaf in enumerate(ModelSpec.weights_of(whole))}
    numbers |= {id(leaf): number for number, leaf in enumerate(leaves)}

    def key_of(placement: Placement) -> tuple[int, str]:
        return numbers[id(placement.param.get_value())], placement.name

    in_whole: dict[tuple[int, str], list[Placement]] = {}
    for placement in stored(of_all):
        in_whole.setdefault(key_of(placement), []).append(placement)
    found: list[list[list[_Region]]] = [[] for _ in leaves]  # by leaf and device
    for rank in range(devices):
        of_leaves: list[list[_Region]] = [[] for _ in leaves]
        for part in stored(shards(of_all, of_one, rank, devices)):
            key = key_of(part)
            for placement in in_whole[key]:
                if (region := _common(part, placement)) is not None:
                    _add(of_leaves[key[0]], region)
        for earlier, regions in zip(found, of_leaves, strict=True):
            earlier.append(_new(regions, [each for device in earlier for each in device]))
    return [_packed(leaf.shape, regions) for leaf, regions in zip(leaves, found, strict=True)]


def _common(part: Placement, whole: Placement) -> _Region | None:
    """Return the values of a device's part that are in a placement of the whole model."""
    ours, theirs = _as_stored(part), _as_stored(whole)
    our_tensor, their_tensor = box(part.shape, part.part), box(whole.shape, whole.part)
    axes = iter([axis for axis, picked in enumerate(their_tensor) if len(picked) > 1])
    region: _Region = []
    for own, other in zip(ours, theirs, strict=True):
        if len(other) == 1:
            region.append((np.asarray(own), np.asarray(other)))
            continue
        axis = next(axes)
        places = np.full(whole.shape[axis], -1)
        places[np.asarray(their_tensor[axis])] = np.arange(len(other))
        places = places[np.asarray(our_tensor[axis])]
        region.append((np.asarray(own)[places >= 0], np.asarray(other)[places[places >= 0]]))
    single = [axis for axis, picked in enumerate(their_tensor) if len(picked) == 1]
    is_apart = any(list(our_tensor[axis]) != list(their_tensor[axis]) for axis in single)
    if is_apart or not all(len(own) for own, _ in region):
        return None
    return region[::-1] if part.transpose else region


def _as_stored(placement: Placement) -> list[Any]:
    """Return the placement's box of the parameter, in the tensor's order of axes."""
    place = box(placement.param.shape, placement.index)
    return place[::-1] if placement.transpose else place


def _add(regions: list[_Region], region: _Region) -> None:
    """Add a region, in one with each of those that differ from it along one axis."""
    for number, other in enumerate(regions):
        axes = zip(region, other, strict=True)
        apart = [axis for axis, pair in enumerate(axes) if not _are_equal(*pair)]
        if len(apart) == 1:
            (axis,) = apart
            merged = region.copy()
            own, there = map(np.concatenate, zip(other[axis], region[axis], strict=True))
            merged[axis] = own, there
            if all(len(np.unique(indices)) == len(indices) for indices in merged[axis]):
                del regions[number]
                return _add(regions, merged)
    regions.append(region)
    return None


def _are_equal(one: _Axis, other: _Axis) -> bool:
    return all(map(np.array_equal, one, other))


def _new(regions: list[_Region], earlier: list[_Region]) -> list[_Region]:
    """Return regions without the values of the whole model that are in earlier ones."""
    new: list[_Region] = []
    for region in regions:
        left = [region]
        for other in (*earlier, *new):
            left = [piece for each in left for piece in _without(each, other)]
        new += left
    return new


def _without(region: _Region, other: _Region) -> list[_Region]:
    inside = [np.isin(one[1], two[1]) for one, two in zip(region, other, strict=True)]
    if not all(each.any() for each in inside):
        return [region]
    pieces: list[_Region] = []
    for axis, is_in in enumerate(inside):
        if not is_in.all():
            pieces.append(_cut(region, axis, ~is_in))
        region = _cut(region, axis, is_in)
    return pieces


def _cut(region: _Region, axis: int, is_there: np.ndarray) -> _Region:
    own, there = region[axis]
    return [*region[:axis], (own[is_there], there[is_there]), *region[axis + 1 :]]


def _packed(shape: tuple[int, ...], of_devices: list[list[_Region]]) -> _Places:
    count = len(of_devices), max(map(len, of_devices))
    places = _Places(
        np.zeros(count, bool), tuple(np.full((*count, size), -1, np.int32) for size in shape)
    )
    for rank, regions in enumerate(of_devices):
        for number, region in enumerate(regions):
            places.is_used[rank, number] = True
            for indices, (own, there) in zip(places.by_axis, region, strict=True):
                indices[rank, number, own] = there
    return places

"""Fingerprint of a model: its architecture, weights and dtype."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import parallel
from jaxspec.models.checkpoint_module import CheckpointModule, ModelSpec
from jaxspec.models.layers.moe import sharing_experts
from jaxspec.models.layers.parameters import Placement, box
from jaxspec.models.layers.weight_matrix import stored
from jaxspec.models.shards import shards
from jaxspec.parallel import ALONE, Group

_VALUES = 256  # sampled values per leaf
_Indices = Int[np.ndarray, "axes values"]  # of sampled values in an array; -1 where it lacks them


def fingerprint(model_spec: ModelSpec, weights: Sequence[Array], group: Group = ALONE) -> str:
    """Return 64 hexadecimal digits that are equal for engines with the same model.

    They are the SHA-256 of the model's configuration, the shapes and dtypes of its weights, and a
    regular sample of values of each weight, all as on a single device, and of whether activations
    are rounded. Further training changes nearly all values, and with them the fingerprint. Weights
    in 8 or 4 bits have another one than the same weights dequantised. Engine sizes, the number of
    devices and separately loaded drafters are not included.

    Waits for the devices.

    Args:
        model_spec: Spec of the model, with the sizes of one device.
        weights: Its weights, in the order of `ModelSpec.weights_of`.
        group: The devices that share the model.
    """
    whole = model_spec.whole.model()
    leaves = ModelSpec.weights_of(whole)
    digest = hashlib.sha256(repr(sharing_experts(whole.config, None)).encode())
    digest.update(repr([(leaf.shape, leaf.dtype.name) for leaf in leaves]).encode())
    if any(form is not None and form.terms == 1 for form in model_spec.forms):
        digest.update(b"activations are rounded")
    indices = _indices_of(model_spec, group.size)
    sampled = _sampler(group, group.devices)
    for each in zip(weights, indices, strict=True):  # a program per shape, and one sum at a time
        digest.update(np.asarray(sampled(*each)).tobytes())
    return digest.hexdigest()


@functools.lru_cache(8)
def _sampler(group: Group, devices: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the program of a group with these devices; updated weights are sampled by it again."""
    return jax.jit(group.on_each(_sampled, whole=1, equal=True))


@functools.lru_cache(8)
def _indices_of(model_spec: ModelSpec, devices: int) -> list[Any]:
    return _indices(model_spec.whole.model(), model_spec.model(), devices)


def _sampled(weight: Array, indices: Int[Array, "devices axes values"]) -> Int[Array, " values"]:
    """Return the bits of at most twice `_VALUES` values of a weight, as float32."""
    own = indices[parallel.first_of(1)]
    bits = jax.lax.bitcast_convert_type(weight[tuple(own)].astype(jnp.float32), jnp.int32)
    return parallel.reduce(jnp.where(own[0] < 0, 0, bits))


def _indices(
    whole: CheckpointModule, local: CheckpointModule, devices: int
) -> list[Int[np.ndarray, "devices axes values"]]:
    """Return where each device has the sampled values of each weight; one device has a value."""
    leaves = ModelSpec.weights_of(whole)
    of_all, of_one = list(whole.checkpoint()), list(local.checkpoint())
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    samples = [_sample(leaf.shape) for leaf in leaves]
    numbers |= {id(leaf): number for number, leaf in enumerate(ModelSpec.weights_of(local))}

    def key_of(placement: Placement) -> tuple[int, str]:
        return numbers[id(placement.param.get_value())], placement.name

    in_tensors: dict[tuple[int, str], _Indices] = {}
    for placement in stored(of_all):
        key = key_of(placement)
        indices = _in_tensor(placement, samples[key[0]])
        in_tensors[key] = np.maximum(in_tensors.get(key, -1), indices)
    found = [np.full((devices, *each.shape), -1, np.int32) for each in samples]
    for rank in range(devices):
        for part in stored(shards(of_all, of_one, rank, devices)):
            key = key_of(part)
            of_ranks, indices = found[key[0]], _in_parameter(part, in_tensors[key])
            is_new = (of_ranks[:, 0] < 0).all(axis=0)
            of_ranks[rank] = np.where(is_new, indices, of_ranks[rank])
    return found


def _sample(shape: tuple[int, ...]) -> _Indices:
    size = int(np.prod(shape))
    return np.stack(np.unravel_index(np.arange(0, size, max(1, size // _VALUES)), shape))


def _in_tensor(placement: Placement, indices: _Indices) -> _Indices:
    """Return the indices in a placement's tensor, given those in its parameter."""
    shape, place = _as_stored(placement)
    if placement.transpose:
        indices = indices[::-1]
    return _moved(indices, shape, place, box(placement.shape, placement.part))


def _in_parameter(placement: Placement, indices: _Indices) -> _Indices:
    """Return the indices in a placement's parameter, given those in its tensor."""
    place = _as_stored(placement)[1]
    tensor = placement.shape
    moved = _moved(indices, tensor, box(tensor, placement.part), place)
    return moved[::-1] if placement.transpose else moved


def _as_stored(placement: Placement) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the placement's box of the parameter, in the tensor's order of axes."""
    shape: tuple[int, ...] = placement.param.shape
    place = box(shape, placement.index)
    return (shape[::-1], place[::-1]) if placement.transpose else (shape, place)


def _moved(
    indices: _Indices, shape: tuple[int, ...], place: list[Any], target: list[Any]
) -> _Indices:
    """Return indices into the box `place` of an array as those into the box `target` of another.

    The boxes have equal sizes, apart from axes of size 1. Indices outside `place` become -1.
    """
    within = [_within(*each) for each in zip(indices, shape, place, strict=True)]
    is_inside = np.all([indices[0] >= 0, *(each >= 0 for each in within)], axis=0)
    steps: Iterator[np.ndarray] = (
        each for each, picked in zip(within, place, strict=True) if len(picked) > 1
    )
    moved = [np.asarray(p)[next(steps) if len(p) > 1 else 0 * indices[0]] for p in target]
    return np.where(is_inside, np.stack(moved), -1)


def _within(indices: np.ndarray, size: int, picked: Any) -> np.ndarray:
    """Return the places of indices along an axis in `picked`; -1 where they are not."""
    places = np.full(size, -1)
    places[np.asarray(picked)] = np.arange(len(picked))
    return places[indices]

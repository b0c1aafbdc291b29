"""Published tensors of the leaves of a module: the inverse of loading."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.base import ModelSpec
from jaxspec.models.layers.parameters import Placement, box
from jaxspec.models.layers.weight_matrix import stored
from jaxspec.models.shards import of_devices
from jaxspec.models.trees.layout import WeightLayout


def exported(layout: WeightLayout, weights: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """Return copies of the tensors on the host, by canonical name. Waits for the devices.

    Args:
        layout: The module, of which no matrix is in 8 or 4 bits.
        weights: Its leaves.
    """
    numbers = {id(leaf): n for n, leaf in enumerate(ModelSpec.weights_of(layout.local))}
    found: dict[str, np.ndarray] = {}
    for rank, device in enumerate(layout.group.devices):
        held = -1, np.empty(0)
        for placement in _of_rank(layout, rank):
            number = numbers[id(placement.param.get_value())]
            if held[0] != number:
                held = number, _part_on(device, weights[number])
            tensor = found.setdefault(
                placement.name, np.zeros(placement.shape, placement.param.dtype)
            )
            _read(placement, held[1], tensor)
    return found


def _of_rank(layout: WeightLayout, rank: int) -> Iterator[Placement]:
    local = list(layout.local.checkpoint())
    if layout.group.size == 1:
        return stored(local)
    whole = layout.spec.whole.model().checkpoint()
    return stored(of_devices(whole, local, layout.group.size)[rank])


def _part_on(device: Any, leaf: jax.Array) -> np.ndarray:
    shards = leaf.addressable_shards
    (found,) = (each.data for each in shards if len(shards) == 1 or each.device == device)
    # NumPy reads a copy: the leaf itself would keep its values on the host.
    return np.asarray(jnp.array(found, copy=True))


def _read(placement: Placement, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Write the part of a tensor that a parameter has."""
    values = leaf[np.ix_(*map(np.asarray, box(leaf.shape, placement.index)))]
    if placement.transpose:
        values = values.T
    if placement.scale != 1.0:
        values = (values.astype(np.float32) / np.float32(placement.scale)).astype(values.dtype)
    place = np.ix_(*map(np.asarray, box(tensor.shape, placement.part)))
    tensor[place] = values.reshape(tensor[place].shape)

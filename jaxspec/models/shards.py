"""The parts of a checkpoint's tensors that each device of a tensor-parallel group holds."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxspec.models.layers.parameters import Placement, as_slice, box
from jaxspec.parallel import held


def of_devices(
    whole: Iterable[Placement], local: Iterable[Placement], devices: int
) -> list[list[Placement]]:
    """Return the `shards` of each of `devices` devices."""
    of_all, of_one = list(whole), list(local)
    return [list(shards(of_all, of_one, rank, devices)) for rank in range(devices)]


def shards(
    whole: Sequence[Placement], local: Sequence[Placement], rank: int, devices: int
) -> Iterator[Placement]:
    """Yield the placements of one device's parameters.

    Tensors of other devices (`Placement.holder`) are left out. Where sizes of `whole` and `local`
    differ, the devices share that axis of the tensor (`held`).

    Args:
        whole: Placements of the model, as on a single device.
        local: Placements of a model of `ModelConfig.local` sizes, of the same tensors. These have
            the sizes of one device, and the parameters are those to fill.
        rank: Number of the device.
        devices: Number of devices.
    """
    of_all = {placement.name: placement for placement in whole}
    for own in local:
        if own.holder in (None, rank):
            yield _shard(of_all[own.name], own, rank, devices)


def _shard(whole: Placement, local: Placement, rank: int, devices: int) -> Placement:
    if whole.shape == local.shape:
        return local
    by_axis = [
        held(_segments(whole, axis), _segments(local, axis), rank, devices)
        for axis in range(len(whole.shape))
    ]
    wanted = box(local.shape, local.part)
    part = tuple(as_slice(own[np.asarray(w)]) for own, w in zip(by_axis, wanted, strict=True))
    return dataclasses.replace(local, shape=whole.shape, part=part)


def _segments(placement: Placement, axis: int) -> tuple[int, ...]:
    if placement.segments is not None and placement.segments[0] == axis:
        return placement.segments[1]
    return (placement.shape[axis],)

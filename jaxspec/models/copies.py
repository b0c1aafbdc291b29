"""Copies of tensors in a checkpoint, which are compared with the originals and not loaded."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.checkpoint_module import CheckpointModule
from jaxspec.models.safetensors_file import DTYPES

_ELEMENTS = 2**22  # compared at once

Published = dict[str, list[str]]
"""The checkpoint's names of each canonical name."""


def without_copies(family: type[CheckpointModule], published: Published) -> Published:
    """Return the names without those of copies (`CheckpointModule.copies`)."""
    dropped = {copy for copy, _ in _pairs(family, published)}
    return {canonical: names for canonical, names in published.items() if canonical not in dropped}


def check_copies(
    family: type[CheckpointModule],
    published: Published,
    are_equal: Callable[[str, str], bool],
    source: str,
) -> None:
    """Compare copies with their originals.

    Args:
        family: The module, which has only the originals.
        published: The names with those of copies.
        are_equal: Compares two tensors by their names in the checkpoint.
        source: Name of the checkpoint, for errors.

    Raises:
        ValueError: They differ.
    """
    for pair in _pairs(family, published):
        copy, original = (published[canonical][0] for canonical in pair)
        if not are_equal(copy, original):
            raise ValueError(
                f"{source}: {copy} must equal {original}, which the draft head shares, and "
                "differs. Replace it by a copy of that tensor, or remove it; to run without the "
                "draft head, remove all tensors of its layer."
            )


def _pairs(
    family: type[CheckpointModule], published: Mapping[str, list[str]]
) -> Iterable[tuple[str, str]]:
    """Return the canonical names of copies and originals that are both there."""
    return [pair for pair in family.copies.items() if published.keys() >= set(pair)]


def stored_alike(checkpoint: Checkpoint) -> Callable[[str, str], bool]:
    """Return a comparison of two tensors of `checkpoint`, which reads them piece by piece."""

    def are_equal(one: str, other: str) -> bool:
        first, second = map(checkpoint.stored, (one, other))
        if first.shape != second.shape or not {first.dtype, second.dtype} <= DTYPES.keys():
            return False
        size = int(np.prod(first.shape, dtype=np.int64))
        return all(
            np.array_equal(_piece(checkpoint, one, at, size), _piece(checkpoint, other, at, size))
            for at in range(0, size, _ELEMENTS)
        )

    return are_equal


def _piece(checkpoint: Checkpoint, name: str, start: int, size: int) -> np.ndarray:
    """Return some elements of a tensor as float32."""
    into = np.empty(min(_ELEMENTS, size - start), DTYPES[checkpoint.stored(name).dtype])
    checkpoint.read(name, start, into)
    return into.astype(np.float32)

"""MLXCheckpoint: the tensors of a Gated DeltaNet model that mlx-lm or mlx-vlm saved.

mlx-lm's `sanitize` (ml-explore/mlx-lm, mlx_lm/models/qwen3_5.py at 012facae6f52 and
qwen3_5_moe.py at 48aab6cd476a) changes more than names: it stores convolutions as
`[channels, taps, 1]`, adds 1 to the weights of zero-centred norms, and stacks experts under
`switch_mlp`. It recognizes its own files by the shape of the convolutions, and so does `is_mlx`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.safetensors_file import DTYPES, StoredTensor

_CONVOLUTION = ".linear_attn.conv1d.weight"
_CENTRED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_STACK = re.compile(r"(.+\.mlp\.)switch_mlp\.((?:gate|up|down)_proj\.weight)")
_HEAD = "mtp."
_MAX_EXPERTS = 2**12


class _Place(NamedTuple):
    """A tensor by its own name, and the part of it that a published tensor is."""

    own: str
    stored: StoredTensor
    first: int = 0  # index of the first element
    is_centred: bool = False  # 1 is added to the published values


class MLXCheckpoint:
    """The `Checkpoint` in a folder that mlx-lm wrote, in the published layout."""

    def __init__(self, checkpoint: Checkpoint):
        """Wrap an open checkpoint for which `is_mlx` is true."""
        self.inner = checkpoint
        self.path: Path = checkpoint.path
        self.asked_by, self.remedy = checkpoint.asked_by, checkpoint.remedy
        self._places: dict[str, _Place] = {}
        for own in sorted(checkpoint.names):
            for name, place in _places(own, checkpoint.stored(own)):
                is_new = name not in self._places and (name == own or name not in checkpoint.names)
                self._places[name if is_new else own] = place

    def __enter__(self) -> "MLXCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def files_of(self, name: str) -> list[str]:
        return self.inner.files_of(self._places[name].own)

    def stored(self, name: str) -> StoredTensor:
        return self._places[name].stored

    def bytes_by_type(self) -> Mapping[str, int]:
        return self.inner.bytes_by_type()

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """See `Checkpoint.read`; norms are float32, in which subtracting 1 is exact."""
        place = self._places[name]
        if not place.is_centred:
            self.inner.read(place.own, place.first + first, into)
            return
        held = np.empty(into.size, DTYPES[self.inner.stored(place.own).dtype])
        self.inner.read(place.own, first, held)
        into[...] = held.astype(np.float32) - 1

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()


def is_mlx(checkpoint: Checkpoint) -> bool:
    """Return whether a convolution of Gated DeltaNet has the shape that mlx-lm stores."""
    name = next((each for each in checkpoint.names if each.endswith(_CONVOLUTION)), None)
    if name is None:
        return False
    shape = checkpoint.stored(name).shape
    return len(shape) == 3 and shape[2] == 1 < shape[1]


def _places(own: str, stored: StoredTensor) -> list[tuple[str, _Place]]:
    """Return the published tensors, by name, that one tensor of the files contains.

    mlx-lm drops draft heads. Those that other programs add are not read: whether 1 is added to
    their norms can't be seen.
    """
    if _HEAD in own:
        return []
    shape = stored.shape
    if own.endswith(_CONVOLUTION) and len(shape) == 3:  # the same order of elements
        return [(own, _Place(own, _of_shape(stored, (shape[0], shape[2], shape[1]))))]
    if own.endswith(_CENTRED) and len(shape) == 1 and stored.dtype in DTYPES:
        as_float32 = StoredTensor("F32", shape, stored.start, stored.num_bytes)
        return [(own, _Place(own, as_float32, is_centred=True))]
    found = _STACK.fullmatch(own)
    if found is None or len(shape) != 3 or not 0 < shape[0] <= _MAX_EXPERTS:
        return [(own, _Place(own, stored))]
    expert = _of_shape(stored, shape[1:], stored.num_bytes // shape[0])
    return [
        (f"{found[1]}experts.{i}.{found[2]}", _Place(own, expert, i * math.prod(shape[1:])))
        for i in range(shape[0])
    ]


def _of_shape(
    stored: StoredTensor, shape: tuple[int, ...], num_bytes: int | None = None
) -> StoredTensor:
    size = stored.num_bytes if num_bytes is None else num_bytes
    return StoredTensor(stored.dtype, shape, stored.start, size)

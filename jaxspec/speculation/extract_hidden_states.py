"""What users may say of the method that drafts nothing and saves hidden states."""

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxspec.checks import is_integer, items, path, shown

_MAX_LAYERS = 16


@dataclasses.dataclass(frozen=True)
class ExtractHiddenStatesOptions:
    """What some layers make of each token, saved in a file for each sample that ends.

    `layers`: where the residual stream is read, in this order: i is what comes into layer i, so 0
    is the embedding, and the number of layers is what leaves the last one, before the final norm.
    `folder`: where the files lie. It is made if only its last part is missing.
    `request_id_prefix`: only requests whose id begins with it are saved; "" saves all.
    """

    layers: Sequence[int] | None = None
    folder: str | Path | None = None
    request_id_prefix: str = ""
    num_drafts: ClassVar[int] = 0
    has_distribution: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check what can be told without the model and the disk, and keep Python's own types."""
        object.__setattr__(self, "layers", _layers(self.layers))
        if self.folder is None:
            raise ValueError(
                "The method 'extract_hidden_states' needs a place to save to: give 'folder', the "
                "folder that its files shall lie in."
            )
        object.__setattr__(self, "folder", str(path("folder", self.folder)))
        if not isinstance(self.request_id_prefix, str):
            raise ValueError(
                f"request_id_prefix must be a text, got {shown(self.request_id_prefix)}."
            )


def _layers(given: Any) -> tuple[int, ...]:
    found = items(given, _MAX_LAYERS)
    if not found or len(found) > _MAX_LAYERS or not all(is_integer(i) and i >= 0 for i in found):
        raise ValueError(
            f"layers must list 1 to {_MAX_LAYERS} layers of the model by their indices, from 0 on, "
            f"got {shown(given)}. For a model of 24 layers, EAGLE-3 would read [2, 12, 21]."
        )
    index, times = collections.Counter(found).most_common(1)[0]
    if times > 1:
        raise ValueError(f"layers must list a layer once, got {shown(index)} {times} times.")
    return tuple(map(int, found))

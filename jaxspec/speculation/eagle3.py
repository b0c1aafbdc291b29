"""What users may say of drafts with an EAGLE-3 head."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxspec.checks import is_integer, items, path, shown, text

_MAX_LAYERS = 16  # of the target, that a head reads


@dataclasses.dataclass(frozen=True)
class Eagle3Options:
    """Drafts with a head that was trained for the target (EAGLE-3, arXiv 2503.01840).

    `model`: the head's folder or hub id; `revision`: the branch, tag or commit of a hub id.
    `aux_layer_ids`: the target's layers, counted from 0, before which the head reads the residual
    stream. None: those that its config.json names, or else the third, the middle one and the third
    from the end. Some trainers count otherwise: where few drafts stand, try one more or one less.
    """

    model: str | Path | None = None
    revision: str | None = None
    aux_layer_ids: Sequence[int] | None = None
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check that there is a head, and keep the layers as Python's own types."""
        if self.model is None:
            raise ValueError(
                "The method 'eagle3' needs a head to draft with: give 'model', a folder or a hub "
                "id of an EAGLE-3 head that was trained for the target."
            )
        object.__setattr__(self, "model", path("model", self.model))
        if self.revision is not None:
            object.__setattr__(self, "revision", text("revision", self.revision))
        object.__setattr__(self, "aux_layer_ids", _layer_ids(self.aux_layer_ids))


def _layer_ids(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    ids = items(given, _MAX_LAYERS)
    if not ids or len(ids) > _MAX_LAYERS or not all(is_integer(i) and i >= 0 for i in ids):
        raise ValueError(
            f"aux_layer_ids must list 1 to {_MAX_LAYERS} of the target's layers by their indices, "
            f"from 0 on, got {shown(given)}. Leave it out to read those that the head's "
            "config.json names."
        )
    return tuple(map(int, ids))

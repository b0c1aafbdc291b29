"""What users may say of drafts from a second, smaller model."""

import dataclasses
from pathlib import Path
from typing import ClassVar

from jaxspec.checks import path, text


@dataclasses.dataclass(frozen=True)
class DraftModelOptions:
    """Drafts from a model of any family that jaxspec loads, with the target's vocabulary.

    `model`: its folder or hub id; `revision`: the branch, tag or commit of a hub id.
    """

    model: str | Path | None = None
    revision: str | None = None
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check that there is a model."""
        if self.model is None:
            raise ValueError(
                "The method 'draft_model' needs a model to draft with: give 'model', a folder or a "
                "hub id of a smaller model with the same vocabulary."
            )
        object.__setattr__(self, "model", path("model", self.model))
        if self.revision is not None:
            object.__setattr__(self, "revision", text("revision", self.revision))

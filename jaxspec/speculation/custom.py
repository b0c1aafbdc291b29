"""What users may say of drafts from a proposer of their own."""

import dataclasses
import re
from typing import Any, ClassVar

from jaxspec.checks import is_integer, shown
from jaxspec.config import MAX_DRAFTS

_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # module:Class


@dataclasses.dataclass(frozen=True)
class CustomOptions:
    """Drafts from the user's own subclass of `jaxspec.proposers.Proposer`.

    `proposer`: an instance, or a text "module:Class" of a class that has a classmethod
    `from_config(config, model)`. Whoever names a class has its module imported.
    """

    proposer: Any = None
    num_drafts: ClassVar[int] = 3  # of a class that is yet to be made; an instance has its own
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check what can be told without JAX; `jaxspec.proposers.custom` checks the rest."""
        proposer = self.proposer
        if isinstance(proposer, str):
            if not _PLACE.fullmatch(proposer):
                raise ValueError(
                    f"A proposer's text must be 'module:Class', got {shown(proposer)}. Name the "
                    "module as an import does, or give an instance."
                )
            return
        if isinstance(proposer, type) or not callable(getattr(proposer, "propose", None)):
            raise ValueError(
                "The method 'custom' needs a proposer: give 'proposer', an instance of your "
                "subclass of jaxspec.proposers.Proposer or a text 'module:Class', got "
                f"{shown(proposer)}."
            )
        count = getattr(proposer, "num_drafts", None)
        if not is_integer(count) or not 1 <= int(count) <= MAX_DRAFTS:  # pyright: ignore
            raise ValueError(
                f"A proposer's num_drafts must be an integer from 1 to {MAX_DRAFTS}, got "
                f"{shown(count)} of {self.name}. Set it, as a field of the dataclass or of the "
                "class."
            )
        try:
            hash(proposer)
        except TypeError as error:
            raise ValueError(
                "A proposer must have a hash, because programs are compiled for it, and "
                f"{self.name} has none ({error}). Make it a frozen dataclass of values "
                "that have one, such as tuples; arrays come from its init_tables."
            ) from error
        object.__setattr__(self, "num_drafts", int(count))  # pyright: ignore[reportArgumentType]

    @property
    def name(self) -> str:
        """The class as "module:Class"."""
        kind = type(self.proposer)
        is_text = isinstance(self.proposer, str)
        return self.proposer if is_text else f"{kind.__module__}:{kind.__qualname__}"

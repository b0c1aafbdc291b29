"""What users may say of drafts that are looked up in the request's own tokens."""

import dataclasses
from typing import ClassVar

from jaxspec.checks import integer

_MOST = 16  # tokens of a match; each costs a comparison of all tokens a step


@dataclasses.dataclass(frozen=True)
class NgramOptions:
    """Drafts that followed the same last tokens earlier in the request, prompt or output.

    The longest match of `prompt_lookup_min` to `prompt_lookup_max` tokens counts, and of equally
    long ones the newest ("Prompt Lookup Decoding", Saxena, 2023). Without a match a row has no
    drafts. One bound alone sets both, as in vLLM.
    """

    prompt_lookup_min: int | None = None  # 2, or prompt_lookup_max
    prompt_lookup_max: int | None = None  # 5, or prompt_lookup_min
    num_drafts: ClassVar[int] = 4
    has_distribution: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check both bounds."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            least, most = 2, 5
        least = integer("prompt_lookup_min", most if least is None else least, 1, _MOST)
        most = integer("prompt_lookup_max", least if most is None else most, 1, _MOST)
        if least > most:
            raise ValueError(
                f"prompt_lookup_min must not exceed prompt_lookup_max, got {least} > {most}."
            )
        object.__setattr__(self, "prompt_lookup_min", least)
        object.__setattr__(self, "prompt_lookup_max", most)

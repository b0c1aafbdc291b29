"""Body: what all bodies share. Values keep their JSON types, and misspelt names are refused."""

import difflib
import itertools
import logging
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxspec.checks import shown

_LOG = logging.getLogger(__name__)
_NEAR = 0.85  # how alike a misspelt name and the right one are; "max_token", "top_K"
_MAX_NAME = 64  # characters of an unknown name that are compared
_MAX_COMPARED = 32  # unknown names that are compared, which takes a millisecond each
_MAX_UNKNOWN = 100


Json = dict[str, Any]

_Item = TypeVar("_Item")
Each = Annotated[list[_Item], Field(fail_fast=True)]
"""A list whose first wrong item is reported: a prompt of a million ids has no million errors."""


class Body(BaseModel):
    """A JSON object. Names that nobody knows are passed over, as vLLM does."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    user: str | None = None

    def given(self) -> Json:
        """What the request holds, names that nobody knows included."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _spelt(self) -> "Body":
        """Refuse a name that is nearly one of ours, for its value would be lost without a word."""
        unknown = self.model_extra or {}
        if len(unknown) > _MAX_UNKNOWN:
            raise ValueError(
                f"there are {len(unknown):,} fields that nobody knows, such as "
                f"{shown(next(iter(unknown)))}, and at most {_MAX_UNKNOWN} are passed over. Leave "
                "them out"
            )
        for name in itertools.islice(unknown, _MAX_COMPARED):
            near = difflib.get_close_matches(name[:_MAX_NAME], type(self).model_fields, 1, _NEAR)
            if near:
                raise ValueError(
                    f"there is no field {shown(name)}; the nearest is {near[0]!r}. Correct it, or "
                    "leave it out"
                )
            _LOG.debug("A request has the field %s, which is passed over.", shown(name))
        return self


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False

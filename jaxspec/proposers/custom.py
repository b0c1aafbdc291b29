"""User-defined proposers: an instance from the options, or one of a named class."""

import importlib
from typing import Any

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import CustomOptions
from jaxspec.proposers.base import Proposer


class CustomProposer:
    """Entry of `PROPOSERS` for user-defined classes; it is never instantiated."""

    @staticmethod
    def from_config(config: SpeculativeConfig, model: Model) -> Proposer:
        """Return the user's proposer, which can draft at least `config.num_drafts` tokens.

        Raises:
            ValueError: there is no such class, or it does not follow `Proposer` or `config`.
        """
        given = config.options.proposer
        proposer = _class(given).from_config(config, model) if isinstance(given, str) else given
        CustomOptions(proposer)  # validates the instance
        if not isinstance(proposer, Proposer):
            raise ValueError(
                "A proposer must be an instance of a subclass of jaxspec.proposers.Proposer, got "
                f"{shown(proposer)}. Extend that class: it has what the engine asks besides."
            )
        name = f"{type(proposer).__module__}:{type(proposer).__qualname__}"
        if proposer.num_drafts < config.num_drafts:
            raise ValueError(
                f"num_speculative_tokens must not exceed the proposer's num_drafts, got "
                f"{config.num_drafts} and {shown(proposer.num_drafts)} of {name}. Lower the "
                "one, or let the proposer draft more."
            )
        is_drawn = config.draft_sample_method == "probabilistic"
        if bool(proposer.is_probabilistic) != is_drawn:
            raise ValueError(
                "Drafts that are drawn, and none else, are verified by rejection sampling: "
                f"draft_sample_method is {config.draft_sample_method!r}, and is_probabilistic of "
                f"{name} is {shown(proposer.is_probabilistic)}. Change one of the two."
            )
        return proposer


def _class(place: str) -> Any:
    """Import the class named by `place`, "module:Class".

    Raises:
        ValueError: there is no such class, or it has no `from_config`.
    """
    module, name = place.split(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs arbitrary code of the module
        raise ValueError(
            f"The proposer's class {shown(place)} must be there to import, and is not: {error}. "
            "Install its module, or put its folder on PYTHONPATH; or give an instance."
        ) from error
    if not callable(getattr(found, "from_config", None)):
        raise ValueError(
            f"A proposer's class that is named must have a classmethod from_config(config, model), "
            f"and {shown(place)} has none. Write it, or give an instance."
        )
    return found

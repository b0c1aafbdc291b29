"""A proposer of the user's own: the instance that was given, or one of the class that was named."""

import importlib
from typing import Any

from jaxspec.checks import shown
from jaxspec.models.base import Model
from jaxspec.proposers.base import Proposer
from jaxspec.speculation import SpeculativeConfig
from jaxspec.speculation.custom import CustomOptions


class CustomProposer:
    """What stands for the user's class in `PROPOSERS`; it has no instances."""

    @staticmethod
    def from_config(config: SpeculativeConfig, model: Model) -> Proposer:
        """The user's proposer, which drafts `config.num_drafts` or is able to draft more.

        Raises:
            ValueError: there is no such class, or it does not follow `Proposer` or `config`.
        """
        given = config.options.proposer
        proposer = _class(given).from_config(config, model) if isinstance(given, str) else given
        CustomOptions(proposer)  # as it checks an instance
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
    """The class that `place` names, "module:Class".

    Raises:
        ValueError: there is none that has `from_config`.
    """
    module, name = place.split(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does when it is imported
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

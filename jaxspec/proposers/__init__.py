"""HOW TO DRAFT: one file a proposer, and the table of them."""

import importlib

from jaxspec.models.base import Model
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.speculation import SpeculativeConfig

# `SpeculativeConfig.method` -> module:class, which has a `from_config(config, model)`.
PROPOSERS = {
    "mtp": "jaxspec.proposers.mtp:MTPProposer",
    "ngram": "jaxspec.proposers.ngram:NgramProposer",
}

__all__ = ["PROPOSERS", "DraftInputs", "Drafts", "Proposer", "make_proposer"]


def make_proposer(config: SpeculativeConfig, model: Model) -> Proposer:
    """The proposer that `config.method` names, for `model`, whose parameters need no values.

    Raises:
        ValueError: the configuration is not for such a model.
    """
    module, name = PROPOSERS[config.method].split(":")
    return getattr(importlib.import_module(module), name).from_config(config, model)

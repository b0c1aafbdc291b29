"""HOW TO DRAFT: one file a proposer, and the table of them."""

import importlib

from jaxspec.models.base import Model, ModelRecipe
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.speculation import SpeculativeConfig

# `SpeculativeConfig.method` -> module:class, which has a `from_config(config, model)`; where the
# options name a checkpoint, `from_config(config, model, recipe)`.
PROPOSERS = {
    "mtp": "jaxspec.proposers.mtp:MTPProposer",
    "ngram": "jaxspec.proposers.ngram:NgramProposer",
    "draft_model": "jaxspec.proposers.draft_model:DraftModelProposer",
    "eagle3": "jaxspec.proposers.eagle3:Eagle3Proposer",
    "suffix": "jaxspec.proposers.suffix:SuffixProposer",
    "extract_hidden_states": "jaxspec.proposers.extract_hidden_states:ExtractHiddenStatesProposer",
    "custom": "jaxspec.proposers.custom:CustomProposer",
}

__all__ = ["PROPOSERS", "DraftInputs", "Drafts", "Proposer", "make_proposer"]


def make_proposer(
    config: SpeculativeConfig, model: Model, drafter: ModelRecipe | None = None
) -> Proposer:
    """The proposer that `config.method` names, for `model`, whose parameters need no values.

    `drafter`: what the checkpoint that the options name is made from.

    Raises:
        ValueError: the configuration is not for such a model.
    """
    module, name = PROPOSERS[config.method].split(":")
    others = () if drafter is None else (drafter,)
    return getattr(importlib.import_module(module), name).from_config(config, model, *others)

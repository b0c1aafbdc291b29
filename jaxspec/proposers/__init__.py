"""Proposers: one file per draft method, and the table of methods."""

import importlib

from jaxspec.models.base import Model, ModelSpec
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer

# `SpeculativeConfig.method` -> module:class, which has a classmethod `from_config(config, model)`;
# if the options name a checkpoint, `from_config(config, model, drafter)`.
PROPOSERS = {
    "mtp": "jaxspec.proposers.mtp:MTPProposer",
    "ngram": "jaxspec.proposers.ngram:NgramProposer",
    "draft_model": "jaxspec.proposers.draft_model:DraftModelProposer",
    "eagle3": "jaxspec.proposers.eagle3:Eagle3Proposer",
    "assistant": "jaxspec.proposers.assistant:AssistantProposer",
    "suffix": "jaxspec.proposers.suffix:SuffixProposer",
    "extract_hidden_states": "jaxspec.proposers.extract_hidden_states:ExtractHiddenStatesProposer",
    "custom": "jaxspec.proposers.custom:CustomProposer",
}

__all__ = ["PROPOSERS", "DraftInputs", "Drafts", "Proposer", "make_proposer"]


def make_proposer(
    config: SpeculativeConfig, model: Model, drafter: ModelSpec | None = None
) -> Proposer:
    """Return the proposer of `config.method` for `model`, whose parameters need no values.

    `drafter` is the spec of the checkpoint that the options name, if any.

    Raises:
        ValueError: the configuration does not fit the model.
    """
    module, name = PROPOSERS[config.method].split(":")
    others = () if drafter is None else (drafter,)
    return getattr(importlib.import_module(module), name).from_config(config, model, *others)

"""HOW TO DRAFT: one file a proposer, and the table of them."""

import importlib

from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.speculation import SpeculativeConfig

# `SpeculativeConfig.method` -> module:class, which has a `from_config(config, vocab_size)`.
PROPOSERS = {
    "mtp": "jaxspec.proposers.mtp:MTPProposer",
}

__all__ = ["PROPOSERS", "DraftInputs", "Drafts", "Proposer", "make_proposer"]


def make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    """The proposer that `config.method` names, for a model of `vocab_size` tokens.

    Raises:
        ValueError: the configuration is not for such a vocabulary.
    """
    module, name = PROPOSERS[config.method].split(":")
    return getattr(importlib.import_module(module), name).from_config(config, vocab_size)

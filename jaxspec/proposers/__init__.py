"""HOW TO DRAFT: one file a proposer, and the table of them."""

import importlib

from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.speculation import SpeculativeConfig

PROPOSERS = {
    "mtp": "jaxspec.proposers.mtp:MTPProposer",
    "oracle": "jaxspec.proposers.oracle:OracleProposer",
}

__all__ = ["PROPOSERS", "DraftInputs", "Drafts", "Proposer", "make_proposer"]


def make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    """The proposer that `config.method` names."""
    module, name = PROPOSERS[config.method].split(":")
    return getattr(importlib.import_module(module), name).from_config(config, vocab_size)

"""Speculation as the user asks for it: how to draft and how to verify, checked when built.

No JAX here. `jaxspec.proposers` has what drafts on the device.
"""

from jaxspec.speculation.config import METHODS, SpeculativeConfig

__all__ = ["METHODS", "SpeculativeConfig"]

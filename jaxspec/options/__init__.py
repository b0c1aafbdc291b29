"""User-facing options, validated when built: engine, speculation, defaults, command-line flags.

Imports no JAX. `jaxspec.proposers` implements the draft methods on the device.
"""

from jaxspec.options.speculation import METHODS, SpeculativeConfig

__all__ = ["METHODS", "SpeculativeConfig"]

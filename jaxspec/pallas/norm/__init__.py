"""RMSNorm, alone and fused with its neighbours, and the residual stream that it adds to."""

from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.rms_norm import rms_norm

__all__ = [
    "add_norm",
    "rms_norm",
]

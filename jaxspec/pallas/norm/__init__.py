"""RMSNorm, alone and fused with the residual add or with gates, and the residual stream."""

from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.rms_norm import rms_norm

__all__ = [
    "add_norm",
    "rms_norm",
]

"""Mixture-of-experts ops: routing, and the feed-forward layers of the chosen experts."""

from jaxspec.pallas.moe.feed_forward import moe_feed_forward
from jaxspec.pallas.moe.latent import latent_moe_feed_forward
from jaxspec.pallas.moe.route import moe_route

__all__ = ["latent_moe_feed_forward", "moe_feed_forward", "moe_route"]

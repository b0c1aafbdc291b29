"""Mixtures of experts: routing, and the feed-forward layers that it chooses among."""

from jaxspec.pallas.moe.feed_forward import moe_feed_forward
from jaxspec.pallas.moe.route import moe_route

__all__ = ["moe_feed_forward", "moe_route"]

"""Sizes of published models, on which kernels are tested, compiled and measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GdnShape:
    """Heads of a Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.value_heads}x{self.value_dim}x{self.key_dim}"


GDN = {
    "qwen3.5-0.8b": GdnShape(16, 16),  # also 2B
    "qwen3.5-9b": GdnShape(16, 32),  # also 4B and 35B-A3B
    "qwen3.5-27b": GdnShape(16, 48),
}

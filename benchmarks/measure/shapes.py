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

    @property
    def projected(self) -> int:
        """Columns of the first product: channels, output gates, b, a, and padding to 64."""
        columns = self.conv_dim + self.value_heads * (self.value_dim + 2)
        return -(-columns // 64) * 64

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.value_heads}x{self.value_dim}x{self.key_dim}"


GDN = {
    "qwen3.5-0.8b": GdnShape(16, 16),  # also 2B
    "qwen3.5-9b": GdnShape(16, 32),  # also 4B and 35B-A3B
    "qwen3.5-27b": GdnShape(16, 48),
    "qwen3.5-122b-a10b": GdnShape(16, 64),
}
KDA = {"kimi-linear-48b-a3b": GdnShape(32, 32)}  # the same sizes; a decay for each key channel


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a full attention layer."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


ATTENTION = {
    "qwen3.5-0.8b": AttentionShape(8, 2, 256),  # also 2B
    "qwen3.5-9b": AttentionShape(16, 4, 256),  # also 4B
    "qwen3.5-27b": AttentionShape(24, 4, 256),
    "qwen3.5-35b-a3b": AttentionShape(16, 2, 256),
    "qwen3.5-122b-a10b": AttentionShape(32, 2, 256),
    "qwen3-8b": AttentionShape(32, 8, 128),
    "nemotron-3-nano": AttentionShape(32, 2, 128),
    "llama-3.2-1b": AttentionShape(32, 8, 64),
}
WIDE_ATTENTION = {  # full attention beside windows
    "gemma-4-e2b": AttentionShape(8, 1, 512),
    "gemma-4-e4b": AttentionShape(8, 2, 512),
    "gemma-4-26b-a4b": AttentionShape(16, 2, 512),
    "gemma-4-31b": AttentionShape(32, 4, 512),
}


@dataclass(frozen=True)
class Mamba2Shape:
    """Heads of a Mamba2 layer, and the groups that share `B` and `C`."""

    heads: int
    groups: int = 8
    head_dim: int = 64
    state_dim: int = 128

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x of all heads, B and C of all groups side by side."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """Columns of the first product: channels, gates, step sizes, and padding to 64."""
        columns = self.conv_dim + self.heads * (self.head_dim + 1)
        return -(-columns // 64) * 64

    def __str__(self) -> str:
        return f"{self.groups}/{self.heads}x{self.head_dim}x{self.state_dim}"


MAMBA2 = {
    "nemotron-3-nano": Mamba2Shape(64),
    "nemotron-h-8b": Mamba2Shape(128),  # also Nemotron-3-Super
    "mamba2-2.7b": Mamba2Shape(80, groups=1),
}


HIDDEN = {  # channels of the residual stream
    "qwen3.5-0.8b": 1024,
    "qwen3.5-2b": 2048,
    "qwen3.5-4b": 2560,
    "qwen3.5-9b": 4096,
    "qwen3.5-27b": 5120,
}

INTERMEDIATE = {  # channels of the feed-forward layer
    "qwen3.5-0.8b": 3584,
    "qwen3.5-2b": 6144,
    "qwen3.5-4b": 9216,
    "qwen3.5-9b": 12288,
    "qwen3.5-27b": 17408,
}

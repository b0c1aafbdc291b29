"""Described: the model's sizes in the header of a GGUF file, validated by kind."""

import dataclasses
from typing import Any

import numpy as np

from jaxspec.checks import shown
from jaxspec.gguf.file import GGUFFile
from jaxspec.models.gguf.rotation import rotation
from jaxspec.models.kinds import MAX_LAYERS, SIZE, Block, Kind, whole
from jaxspec.models.layers.moe import MAX_EXPERTS

EXPERTS = whole(0, MAX_EXPERTS)
"""Kind of a number of experts per layer; 0 if there are none."""
_DRAFT_BLOCKS = whole(0, 1)


@dataclasses.dataclass(frozen=True)
class Described:
    """An open file, and its metadata entries under the architecture's prefix.

    Methods raise ValueError for entries that are missing, malformed or not implemented.
    """

    file: GGUFFile
    sizes: Block

    @property
    def num_draft_blocks(self) -> int:
        """Number of blocks after the trunk's, 0 or 1: the layer of a draft head."""
        return self.sizes.find("nextn_predict_layers", _DRAFT_BLOCKS) or 0

    @property
    def num_layers(self) -> int:
        """Number of blocks of the trunk."""
        drafting = self.num_draft_blocks
        return self.sizes.need("block_count", whole(1 + drafting, MAX_LAYERS)) - drafting

    @property
    def num_experts(self) -> int:
        """Experts per layer; 0 if there are none."""
        return self.sizes.find("expert_count", EXPERTS) or 0

    def has(self, tail: str) -> bool:
        """Return whether any block has a tensor `blk.N.<tail>`."""
        return any(
            name.startswith("blk.") and name.split(".", 2)[-1] == tail for name in self.file.tensors
        )

    def by_layer(self, name: str, kind: Kind[int]) -> list[int]:
        """Return the entry's value for each trunk layer; it may be one value or one per block."""
        value = self.sizes.entries.get(name)
        if not isinstance(value, np.ndarray):
            return [self.sizes.need(name, kind)] * self.num_layers
        listed = value.tolist()
        blocks = self.num_layers + self.num_draft_blocks
        if len(listed) != blocks or not all(map(kind.holds, listed)):
            raise ValueError(
                f"{self.sizes.file}: `{self.sizes.prefix}{name}` must be {kind.words}, or {blocks} "
                f"of them, one for each block, got {shown(listed)}. {self.sizes.remedy}"
            )
        return listed[: self.num_layers]

    def one_of_layers(self, name: str) -> int | None:
        """Return the only value except 0 that `by_layer` has; None if all are 0."""
        sizes = sorted({size for size in self.by_layer(name, whole(0, 2**20)) if size})
        if len(sizes) > 1:
            raise ValueError(
                f"{self.sizes.file}: `{self.sizes.prefix}{name}` must be the same in all blocks "
                f"that have any, got {shown(sizes)}, which jaxspec does not implement. Use another "
                "model."
            )
        return sizes[0] if sizes else None

    def value_dim(self) -> int:
        """Return the value channels of a recurrent head; unequal shares of all are refused."""
        sizes = self.sizes
        channels, heads = (sizes.need(f"ssm.{x}", SIZE) for x in ("inner_size", "time_step_rank"))
        if channels % heads:
            raise ValueError(
                f"{sizes.file}: `{sizes.prefix}ssm.inner_size` must be a multiple of "
                f"`{sizes.prefix}ssm.time_step_rank`, the {heads} heads, got {channels}. "
                f"{sizes.remedy}"
            )
        return channels // heads

    def head_dim(self) -> int:
        given = self.sizes.find("attention.key_length", SIZE)
        heads = self.sizes.need("attention.head_count", SIZE)
        return given or max(1, self.sizes.need("embedding_length", SIZE) // heads)

    def attention(self) -> dict[str, Any]:
        """Return attention's fields without the number of key heads, which may vary by block."""
        head_dim = self.head_dim()
        self.sizes.refuse_all_but({"attention.value_length": (head_dim,)})
        return {
            "num_attention_heads": self.sizes.need("attention.head_count", SIZE),
            "head_dim": head_dim,
            **rotation(self.file, self.sizes, head_dim),
        }

    def key_heads(self) -> dict[str, Any]:
        """Return the number of key heads of a model with attention in every layer, as a field."""
        name = "attention.head_count_kv"
        if self.sizes.entries.get(name) is None:
            return {"num_key_value_heads": self.sizes.need("attention.head_count", SIZE)}
        self.by_layer(name, SIZE)  # every block has some
        return {"num_key_value_heads": self.one_of_layers(name)}

    def mixed_key_heads(self) -> tuple[dict[str, Any], list[bool]]:
        """Return the number of key heads as a field, and which layers have attention."""
        name = "attention.head_count_kv"
        heads = self.one_of_layers(name) or self.sizes.need("attention.head_count", SIZE)
        attending = [count > 0 for count in self.by_layer(name, whole(0, 2**20))]
        return {"num_key_value_heads": heads}, attending

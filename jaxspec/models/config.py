"""ModelConfig: a model's sizes and constants, as its family read them from config.json."""

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
MAMBA2 = "mamba2"
PARALLEL = "parallel"  # attention and Mamba2 side by side
SHORT_CONV = "short_conv"
NO_MIXER = "no_mixer"  # the layer is a feed-forward layer alone
DENSE = "dense"
SQUARED_RELU = "squared_relu"  # dense, without a gate
SPARSE = "sparse"  # a mixture of experts
LATENT_SPARSE = "latent_sparse"  # one whose experts read fewer features
NO_FEED_FORWARD = "no_feed_forward"  # the layer is a token mixer alone

_Part = TypeVar("_Part")


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """What `layers.rope.frequencies` divides slow turns by, and which turns are slow.

    A pair of channels is slow if it turns less than `low_freq_factor` times in the context that the
    model was first trained with, and fast from `high_freq_factor` turns on.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float  # above `low_freq_factor`
    original_max_position_embeddings: int  # tokens of that context


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base, and how many channels of a head it rotates."""

    theta: float
    rotary_dim: int  # the first of the head's `head_dim` channels
    scaling: Llama3Scaling | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a model. Hashable.

    These fields are common to the families. What only some mixers or feed-forward layers need is
    one of `parts`: a frozen dataclass that stands beside the layer and is found by its type.
    """

    architecture: str  # e.g. Qwen3_5ForCausalLM, or the model_type where config.json names none
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense feed-forward layers; 0: there are none
    num_heads: int  # of attention layers, as the next two; 0: there are none
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: attention is told of no positions
    rms_norm_eps: float
    layer_types: tuple[str, ...]  # for each layer a key of `layers.decoder.MIXERS`, or NO_MIXER
    # For each layer a key of `layers.decoder.FEED_FORWARDS`, or NO_FEED_FORWARD.
    feed_forward_types: tuple[str, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # generation_config.json's, then config.json's
    tie_word_embeddings: bool | None  # None: config.json does not say
    gated_attention: bool = False  # each query head comes with a gate of its output
    zero_centred_norms: bool = False  # RMS norms multiply by `1 + weight`
    normed_heads: bool = True  # queries and keys are normalised head by head
    attention_inputs: int | None = None  # features that attention reads; None: `hidden_size`
    num_draft_layers: int = 0  # that config.json or the family promises; a checkpoint may lack them
    draft_feed_forward_type: str = DENSE  # of such a layer, a key of `layers.decoder.FEED_FORWARDS`
    parts: tuple[Any, ...] = ()

    def find_part(self, kind: type[_Part]) -> _Part | None:
        """The one of `parts` that is a `kind`; None where there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def part(self, kind: type[_Part]) -> _Part:
        """The one of `parts` that is a `kind`.

        Raises:
            ValueError: the family did not read such a part.
        """
        part = self.find_part(kind)
        if part is not None:
            return part
        raise ValueError(
            f"A layer needs the sizes of {kind.__name__}, but {self.architecture} was read without "
            "them. Let the family's parse_config put them in `parts`."
        )

    @property
    def num_full_attention_layers(self) -> int:
        """Layers of the trunk that keep keys and values."""
        return sum(kind in (FULL_ATTENTION, PARALLEL) for kind in self.layer_types)

    def is_tied(self, tensors: Collection[str]) -> bool:
        """Whether the embedding serves as output head: the checkpoint has no `lm_head.weight`.

        Where config.json says the two are separate, an absent head is a missing tensor.
        """
        return "lm_head.weight" not in tensors and self.tie_word_embeddings is not False

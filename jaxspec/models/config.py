"""ModelConfig: a model's sizes and constants, parsed from config.json by its family."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, TypeVar

from jaxspec.pallas.matmul.activation import Activation

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
SHARED_FULL = "shared_full_attention"  # to the keys and values of an earlier layer
SHARED_SLIDING = "shared_sliding_attention"  # likewise
READ_SLIDING = "read_sliding_attention"  # to the keys and values that another model has written
LINEAR_ATTENTION = "linear_attention"
LATENT_ATTENTION = "latent_attention"
KIMI_DELTA = "kimi_delta"
MAMBA2 = "mamba2"
PARALLEL = "parallel"  # attention and Mamba2 on the same input
SHORT_CONV = "short_conv"
NO_MIXER = "no_mixer"  # a layer with only a feed-forward part
DENSE = "dense"
DOUBLE_DENSE = "double_dense"  # of twice the width
SQUARED_RELU = "squared_relu"  # dense, without a gate
SPARSE = "sparse"  # a mixture of experts
DENSE_AND_SPARSE = "dense_and_sparse"  # both on the same stream, each with its norms
LATENT_SPARSE = "latent_sparse"  # a mixture whose experts read a latent projection
ROUTED = (SPARSE, DENSE_AND_SPARSE, LATENT_SPARSE)
NO_FEED_FORWARD = "no_feed_forward"  # a layer with only a token mixer
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

_Part = TypeVar("_Part")


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's RoPE scaling: low frequencies are divided by `factor` (`layers.rope.frequencies`).

    A pair of channels is slow if it makes fewer than `low_freq_factor` turns within the original
    context, and fast from `high_freq_factor` turns on.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float  # above `low_freq_factor`
    original_max_position_embeddings: int  # original context length in tokens


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: slow pairs are divided by `factor`, and queries and keys are multiplied by a constant.

    Peng et al. 2023, arXiv 2309.00071. A pair of channels is slow if it makes at most `beta_slow`
    turns within the original context, and fast from `beta_fast` turns on (`layers.rope`).
    """

    factor: float
    original_max_position_embeddings: int  # original context length in tokens
    beta_fast: float = 32.0  # at least `beta_slow`
    beta_slow: float = 1.0
    truncate: bool = True  # the first and last pair between slow and fast are rounded outwards
    attention_factor: float | None = None  # of rotated queries and keys; None means from mscale
    mscale: float = 0.0  # 0 means that config.json has none
    mscale_all_dim: float = 0.0  # likewise

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth(1.0)

    def growth(self, scale: float) -> float:
        """Return `1 + 0.1 scale ln(factor)`."""
        return 0.1 * scale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Only the first pairs of channels turn, with the frequencies that they have in a whole head.

    Gemma 4's full attention, `rope_type` "proportional" in Hugging Face's transformers.
    """

    turning_pairs: int


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    theta: float
    rotary_dim: int  # number of rotated channels, the first of `head_dim`
    scaling: Llama3Scaling | YarnScaling | ProportionalScaling | None = None

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def extended_length(self) -> int:
        """Context length in tokens that YaRN extends to; 0 without it."""
        if not isinstance(self.scaling, YarnScaling):
            return 0
        return int(self.scaling.original_max_position_embeddings * self.scaling.factor)


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """Sizes of full attention in a model whose layers with a window have other ones (Gemma 4)."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    keys_are_values: bool  # see `ModelConfig`

    def local(self, devices: int) -> "FullAttention":
        """Return the sizes that each of `devices` devices holds."""
        name = "num_global_key_value_heads"
        return dataclasses.replace(
            self, num_kv_heads=share_or_copy(self.num_kv_heads, devices, name)
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a model. Hashable.

    The fields are common to all families. Sizes that only some layers need are in `parts`: frozen
    dataclasses defined next to these layers and looked up by type.
    """

    architecture: str  # e.g. Qwen3_5ForCausalLM, or the model_type if config.json has none
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of dense feed-forward layers; 0 if there are none
    num_heads: int  # query heads of attention layers; 0 if there are none, as the next two
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None means attention without position encoding
    rms_norm_eps: float
    layer_types: tuple[str, ...]  # per layer a key of `layers.decoder.MIXERS`, or NO_MIXER
    # Per layer a key of `layers.decoder.FEED_FORWARDS`, or NO_FEED_FORWARD.
    feed_forward_types: tuple[str, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # generation_config.json's, then config.json's
    tie_word_embeddings: bool | None  # None if config.json does not set it
    embedding_factor: float = 1.0  # of embeddings as inputs; a tied output head is without it
    gated_attention: bool = False  # each query head has a gate for its output
    zero_centred_norms: bool = False  # RMS norms multiply by `1 + weight`
    normed_heads: bool = True  # RMS norms per head of queries and keys
    normed_values: bool = False  # values are normed per head, too, without a weight
    keys_are_values: bool = False  # values are the projected keys, before norm and rotation
    full_attention: FullAttention | None = None  # None means the sizes of all attention layers
    # The outputs of both halves of a layer are normed before they are added to the stream, and the
    # layer's sum is multiplied by a learned number.
    normed_outputs: bool = False
    activation: Activation = Activation.SWIGLU  # of dense feed-forward layers with a gate
    attention_biases: tuple[str, ...] = ()  # projections of attention with a bias
    window: int | None = None  # positions that sliding attention sees, a token's own included
    attention_sinks: bool = False  # each query head has a score for attending to nothing
    attention_inputs: int | None = None  # input features of attention; None means `hidden_size`
    num_draft_layers: int = 0  # as config.json or the family declares; a checkpoint may lack them
    draft_mixer_type: str = FULL_ATTENTION  # as in `layer_types`, of the draft layers
    draft_feed_forward_type: str = DENSE  # likewise
    parts: tuple[Any, ...] = ()
    # The checkpoint has a scale for the keys, and one for the values, of each attention layer.
    scales_kv: bool = dataclasses.field(default=False, repr=False)
    # Devices that share the model; heads and widths are those of one, `vocab_size` is the model's.
    devices: int = 1
    # Sizes of all devices together; None if a single device holds the model.
    of_all: "ModelConfig | None" = dataclasses.field(default=None, repr=False)

    @property
    def whole(self) -> "ModelConfig":
        """The model's sizes, as on a single device."""
        return self.of_all or self

    def local(self, devices: int) -> "ModelConfig":
        """Return the sizes that each of `devices` devices holds of the model.

        A device holds an equal share of the heads and of the widths. If there are fewer key-value
        heads than devices, several devices hold the same one.

        Raises:
            ValueError: A size cannot be shared.
        """
        if devices == 1:
            return self
        parts = [part.local(devices) if hasattr(part, "local") else part for part in self.parts]
        return dataclasses.replace(
            self,
            intermediate_size=share(self.intermediate_size, devices, "intermediate_size"),
            num_heads=share(self.num_heads, devices, "num_attention_heads"),
            num_kv_heads=share_or_copy(self.num_kv_heads, devices, "num_key_value_heads"),
            full_attention=self.full_attention and self.full_attention.local(devices),
            parts=tuple(parts),
            devices=devices,
            of_all=self,
        )

    @property
    def full_rope(self) -> RopeConfig | None:
        """Rotation of full attention, if it differs from that of other layers."""
        return None if self.full_attention is None else self.full_attention.rope

    def of_mixer(self, mixer: str) -> "ModelConfig":
        """Return the config with the sizes of a mixer, which is an entry of `layer_types`."""
        full = self.full_attention
        if mixer not in (FULL_ATTENTION, SHARED_FULL) or full is None:
            return self
        return dataclasses.replace(
            self,
            num_kv_heads=full.num_kv_heads,
            head_dim=full.head_dim,
            rope=full.rope,
            keys_are_values=full.keys_are_values,
        )

    def of_layer(self, index: int) -> "ModelConfig":
        """Return the config with parts that differ by layer as layer `index` has them."""
        parts = [part.of_layer(index) if hasattr(part, "of_layer") else part for part in self.parts]
        return dataclasses.replace(self, parts=tuple(parts))

    def find_part(self, kind: type[_Part]) -> _Part | None:
        """Return the part of type `kind`, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def part(self, kind: type[_Part]) -> _Part:
        """Return the part of type `kind`.

        Raises:
            ValueError: There is no such part.
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
        """Trunk layers that store keys and values, or latents of both."""
        kinds = FULL_ATTENTION, LATENT_ATTENTION, PARALLEL
        return sum(kind in kinds for kind in self.layer_types)

    def is_tied(self, tensors: Collection[str]) -> bool:
        """Return whether the embedding is also the output head.

        That is the case if the checkpoint has no `lm_head.weight`, unless config.json sets
        `tie_word_embeddings` to false: then `lm_head.weight` is a missing tensor.
        """
        return "lm_head.weight" not in tensors and self.tie_word_embeddings is not False


def share(count: int, devices: int, name: str) -> int:
    """Return the equal share of each device.

    Raises:
        ValueError: `count` is no multiple of `devices`.
    """
    if count % devices:
        raise _unshared(count, devices, name, [n for n in range(1, 17) if count % n == 0])
    return count // devices


def share_or_copy(count: int, devices: int, name: str) -> int:
    """Like `share`, but fewer than `devices` are copied, each to equally many devices."""
    if 0 < count < devices and devices % count == 0:
        return 1
    if count % devices:
        fitting = [n for n in range(1, 17) if count % n == 0 or n % count == 0]
        raise _unshared(count, devices, name, fitting)
    return count // devices


def _unshared(count: int, devices: int, name: str, fitting: list[int]) -> ValueError:
    return ValueError(
        f"tensor_parallel_size must divide {name}, which is {count} in this model, got {devices}. "
        f"For this size use one of {', '.join(map(str, fitting))}."
    )

"""ModelConfig: what a checkpoint's config.json says, checked, in one spelling."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a model. Hashable; fields a family lacks are 0."""

    architecture: str  # e.g. Qwen3_5ForCausalLM, or the model_type where config.json names none
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # of a head's head_dim channels, how many (the first) are rotated
    rope_theta: float
    rms_norm_eps: float
    layer_types: tuple[str, ...]  # FULL_ATTENTION or LINEAR_ATTENTION, one a layer
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # generation_config.json's, then config.json's
    tie_word_embeddings: bool | None  # None: config.json does not say
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_kernel: int = 0
    num_draft_layers: int = 0  # as config.json says, which checkpoints need not keep to

    @property
    def num_full_attention_layers(self) -> int:
        """Layers of the trunk that keep keys and values."""
        return self.layer_types.count(FULL_ATTENTION)

    @property
    def num_linear_attention_layers(self) -> int:
        """Layers of the trunk that keep a recurrent state."""
        return self.layer_types.count(LINEAR_ATTENTION)

    def is_tied(self, tensors: Collection[str]) -> bool:
        """Whether the embedding serves as output head: the checkpoint has no `lm_head.weight`.

        Where config.json says the two are separate, an absent head is a missing tensor.
        """
        return "lm_head.weight" not in tensors and self.tie_word_embeddings is not False

    @property
    def conv_dim(self) -> int:
        """Channels of a recurrent layer's convolution: queries, keys, values."""
        keys = self.linear_key_heads * self.linear_key_dim
        return 2 * keys + self.linear_value_heads * self.linear_value_dim


def read_architecture(folder: Path) -> str:
    """The name under which the checkpoint in `folder` asks for a model, e.g. Qwen3ForCausalLM.

    `architectures` of config.json, or its `model_type` where that is absent. Raises as
    `read_config`.
    """
    return _architecture(_read_published(folder))


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of the checkpoint in `folder`.

    Raises FileNotFoundError without a config.json, ValueError where it is not JSON or asks for
    what is not implemented.
    """
    generation = folder / "generation_config.json"
    return parse_config(
        _read_published(folder), _read_json(generation) if generation.is_file() else {}
    )


def _read_published(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"A model folder must hold a config.json, and {folder} has none. Give the folder of a "
            "Hugging Face checkpoint (config.json, *.safetensors, tokenizer files) or its hub id."
        )
    return _read_json(path)


def _architecture(published: Mapping[str, Any]) -> str:
    text = published.get("text_config") or {}
    named = published.get("architectures") or text.get("architectures") or [None]
    architecture = named[0] or published.get("model_type") or text.get("model_type")
    if not architecture:
        raise ValueError(
            "config.json must name the model in `architectures` or `model_type`, and has neither. "
            "Take the config.json that was published with the weights."
        )
    return str(architecture)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, and is not: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a JSON object, got {type(content).__name__}. Download it again."
        )
    return content


def parse_config(
    published: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The `ModelConfig` of a config.json in any published spelling.

    A vision-language config's `text_config` is read, its top level fills in what that lacks.
    Raises ValueError naming the field for what is missing, malformed or not implemented.
    """
    text = published.get("text_config") or {}
    fields = _Fields({**published, **text})
    _refuse_unsupported(fields)

    layer_types = _layer_types(fields)
    head_dim = fields.get("head_dim") or fields.size("hidden_size") // fields.size(
        "num_attention_heads"
    )
    hybrid = LINEAR_ATTENTION in layer_types
    theta, rotary_dim = _rope(fields, head_dim, default_partial=0.25 if hybrid else 1.0)
    config = ModelConfig(
        architecture=_architecture(published),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        rms_norm_eps=float(fields.need("rms_norm_eps")),
        layer_types=layer_types,
        max_position_embeddings=fields.size("max_position_embeddings"),
        eos_token_ids=_eos(generation or {}, text, published),
        # A vision-language config carries the flag on both levels, and one of them may be stale.
        tie_word_embeddings=_either(text, published, "tie_word_embeddings"),
        linear_key_heads=fields.size("linear_num_key_heads") if hybrid else 0,
        linear_value_heads=fields.size("linear_num_value_heads") if hybrid else 0,
        linear_key_dim=fields.size("linear_key_head_dim") if hybrid else 0,
        linear_value_dim=fields.size("linear_value_head_dim") if hybrid else 0,
        conv_kernel=fields.size("linear_conv_kernel_dim") if hybrid else 0,
        num_draft_layers=fields.get("mtp_num_hidden_layers") or 0,
    )
    _check_groups(config)
    return config


class _Fields(dict[str, Any]):
    """The config's entries, with errors that name the field."""

    def need(self, name: str) -> Any:
        if self.get(name) is None:
            raise ValueError(
                f"config.json must give `{name}`, and does not. Take the config.json that was "
                "published with the weights."
            )
        return self[name]

    def size(self, name: str) -> int:
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json: `{name}` must be a positive integer, got {value!r}.")
        return value


def _refuse_unsupported(fields: _Fields) -> None:
    """ValueError for an option that would change the computation and is not implemented."""
    expected = {
        "hidden_act": ("silu", "swish"),
        "output_gate_type": ("swish", "silu"),
        "attn_output_gate": (True,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "mtp_use_dedicated_embeddings": (False,),
        "layer_scale": (False,),
        "quantization_config": (),
    }
    for name, accepted in expected.items():
        value = fields.get(name)
        if value is not None and value not in accepted:
            wanted = " or ".join(map(repr, accepted)) or "absent"
            raise ValueError(
                f"config.json: `{name}` must be {wanted}, got {value!r:.80}, which jaxspec does "
                "not implement; without it the output would be wrong. Use a checkpoint that does "
                "not need it."
            )


def _layer_types(fields: _Fields) -> tuple[str, ...]:
    count = fields.size("num_hidden_layers")
    if fields.get("layer_types"):
        kinds = tuple(fields["layer_types"])
    elif fields.get("linear_num_value_heads") is None:
        kinds = (FULL_ATTENTION,) * count
    else:
        interval = fields.get("full_attention_interval") or 4
        kinds = tuple(
            LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(count)
        )
    unknown = sorted(set(kinds) - {FULL_ATTENTION, LINEAR_ATTENTION})
    if unknown or len(kinds) != count:
        raise ValueError(
            f"config.json: `layer_types` must name {FULL_ATTENTION!r} or {LINEAR_ATTENTION!r} for "
            f"each of {count} layers; it has {len(kinds)} entries"
            + (f" and the unknown kinds {unknown}." if unknown else ".")
        )
    return kinds


def _rope(fields: _Fields, head_dim: int, default_partial: float) -> tuple[float, int]:
    """The base and the number of rotated channels."""
    nested = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = nested.get("rope_type") or nested.get("type") or "default"
    # For text the three position rows of multimodal RoPE are equal, which is plain RoPE.
    if kind not in ("default", "mrope"):
        raise ValueError(
            f"config.json: the rope type must be 'default', got {kind!r}, which jaxspec does not "
            "implement. Remove the scaling to run within the original context length."
        )
    theta = nested.get("rope_theta") or fields.need("rope_theta")
    partial = nested.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    rotary_dim = int(head_dim * (partial or default_partial))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} rotates "
            f"{rotary_dim} channels; it must be an even number in 2..{head_dim}."
        )
    return float(theta), rotary_dim


def _eos(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        found = source.get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(ids))


def _either(text: Mapping[str, Any], published: Mapping[str, Any], name: str) -> bool | None:
    said = [bool(source[name]) for source in (text, published) if source.get(name) is not None]
    return any(said) if said else None


def _check_groups(config: ModelConfig) -> None:
    for many, few, what in (
        (config.num_heads, config.num_kv_heads, "num_attention_heads, num_key_value_heads"),
        (config.linear_value_heads, config.linear_key_heads, "linear_num_{value,key}_heads"),
    ):
        if few and many % few:
            raise ValueError(
                f"config.json: {what}: {many} is not a multiple of {few}, as grouped heads need."
            )

"""Load a checkpoint folder or a GGUF file as a `Model`; the tables of architectures."""

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.checks import shown
from jaxspec.models.base import CheckpointModule, Model
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.hub import resolve_folder
from jaxspec.models.layers.moe import sharing_experts
from jaxspec.models.layers.mtp_head import PREFIX, has_draft_head
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.holding import hold_as_published, hold_drawn, rounding
from jaxspec.models.quantised.option import (
    AS_PUBLISHED,
    DrafterOptions,
    QuantisedOptions,
    log_dequantised,
)
from jaxspec.models.quantised.rounded import ROUNDED, RoundedCheckpoint
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.shards import of_devices
from jaxspec.models.source import (
    dequantised,
    giving_sizes,
    naming,
    open_checkpoint,
    read_fields,
)
from jaxspec.models.trees.checkpoint import Tensor, TreeCheckpoint
from jaxspec.models.trees.layout import (
    WeightLayout,
    fill,
    tensors_of_leaves,
    without_equal_head,
)
from jaxspec.models.weights import (
    Some,
    compared,
    draw_weights,
    read_weights,
    undefined,
)
from jaxspec.parallel import ALONE, Group

_LOG = logging.getLogger(__name__)

__all__ = [
    "HEADS",
    "MODELS",
    "AbstractModel",
    "dtype_of",
    "family_of",
    "load_model",
    "parse_config",
    "register_model",
    "resolve_folder",
    "unread",
    "unread_model_or_head",
]

# `architectures` of config.json, or `model_type` if absent -> module:class, or a registered class.
MODELS: dict[str, str | type[Model]] = {
    "BailingHybridForCausalLM": "jaxspec.models.bailing_hybrid:BailingHybrid",
    "BailingMoeV3ForCausalLM": "jaxspec.models.bailing_hybrid:BailingHybrid",
    "bailing_hybrid": "jaxspec.models.bailing_hybrid:BailingHybrid",
    "DeepseekV3ForCausalLM": "jaxspec.models.deepseek:DeepSeekV3",
    "deepseek_v3": "jaxspec.models.deepseek:DeepSeekV3",
    "DeepseekV32ForCausalLM": "jaxspec.models.deepseek:DeepSeekV32",
    "deepseek_v32": "jaxspec.models.deepseek:DeepSeekV32",
    "FalconH1ForCausalLM": "jaxspec.models.falcon_h1:FalconH1",
    "falcon_h1": "jaxspec.models.falcon_h1:FalconH1",
    "Gemma4ForCausalLM": "jaxspec.models.gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "jaxspec.models.gemma4:Gemma4",
    "gemma4": "jaxspec.models.gemma4:Gemma4",
    "gemma4_text": "jaxspec.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "jaxspec.models.gemma4:Gemma4",
    "Gemma4UnifiedForConditionalGeneration": "jaxspec.models.gemma4:Gemma4",
    "gemma4_unified": "jaxspec.models.gemma4:Gemma4",
    "gemma4_unified_text": "jaxspec.models.gemma4:Gemma4",
    "Glm4MoeForCausalLM": "jaxspec.models.glm4_moe:Glm4Moe",
    "glm4_moe": "jaxspec.models.glm4_moe:Glm4Moe",
    "Glm4MoeLiteForCausalLM": "jaxspec.models.deepseek:DeepSeekV3",
    "glm4_moe_lite": "jaxspec.models.deepseek:DeepSeekV3",
    "GptOssForCausalLM": "jaxspec.models.gpt_oss:GptOss",
    "gpt_oss": "jaxspec.models.gpt_oss:GptOss",
    "GraniteForCausalLM": "jaxspec.models.granite:Granite",
    "granite": "jaxspec.models.granite:Granite",
    "GraniteMoeHybridForCausalLM": "jaxspec.models.granite:GraniteHybrid",
    "granitemoehybrid": "jaxspec.models.granite:GraniteHybrid",
    "KimiLinearForCausalLM": "jaxspec.models.kimi_linear:KimiLinear",
    "kimi_linear": "jaxspec.models.kimi_linear:KimiLinear",
    "Lfm2ForCausalLM": "jaxspec.models.lfm2:LFM2",
    "lfm2": "jaxspec.models.lfm2:LFM2",
    "Lfm2MoeForCausalLM": "jaxspec.models.lfm2:LFM2Moe",
    "lfm2_moe": "jaxspec.models.lfm2:LFM2Moe",
    "LlamaForCausalLM": "jaxspec.models.llama:Llama",
    "llama": "jaxspec.models.llama:Llama",
    "Mamba2ForCausalLM": "jaxspec.models.mamba2:Mamba2",
    "mamba2": "jaxspec.models.mamba2:Mamba2",
    "MistralForCausalLM": "jaxspec.models.mistral:Mistral",
    "mistral": "jaxspec.models.mistral:Mistral",
    "NemotronHForCausalLM": "jaxspec.models.nemotron_h:NemotronH",
    "nemotron_h": "jaxspec.models.nemotron_h:NemotronH",
    "Qwen2ForCausalLM": "jaxspec.models.qwen2:Qwen2",
    "qwen2": "jaxspec.models.qwen2:Qwen2",
    "Qwen3_5ForCausalLM": "jaxspec.models.qwen3_5:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "jaxspec.models.qwen3_5:Qwen3_5",
    "qwen3_5": "jaxspec.models.qwen3_5:Qwen3_5",
    "qwen3_5_text": "jaxspec.models.qwen3_5:Qwen3_5",
    "Qwen3_5MoeForCausalLM": "jaxspec.models.qwen3_5_moe:Qwen3_5Moe",
    "Qwen3_5MoeForConditionalGeneration": "jaxspec.models.qwen3_5_moe:Qwen3_5Moe",
    "qwen3_5_moe": "jaxspec.models.qwen3_5_moe:Qwen3_5Moe",
    "qwen3_5_moe_text": "jaxspec.models.qwen3_5_moe:Qwen3_5Moe",
    "Qwen3NextForCausalLM": "jaxspec.models.qwen3_next:Qwen3Next",
    "qwen3_next": "jaxspec.models.qwen3_next:Qwen3Next",
    "Qwen3MoeForCausalLM": "jaxspec.models.qwen3_moe:Qwen3Moe",
    "qwen3_moe": "jaxspec.models.qwen3_moe:Qwen3Moe",
    "Qwen3ForCausalLM": "jaxspec.models.qwen3:Qwen3",
    "qwen3": "jaxspec.models.qwen3:Qwen3",
}


# The same for draft heads with a checkpoint of their own.
HEADS = {
    "Eagle3LlamaForCausalLM": "jaxspec.models.eagle3:Eagle3Head",
    "Eagle3Qwen3ForCausalLM": "jaxspec.models.eagle3:Eagle3Head",
    "Eagle3Speculator": "jaxspec.models.eagle3:Eagle3Head",
    "LlamaForCausalLMEagle3": "jaxspec.models.eagle3:Eagle3Head",
    "Gemma4AssistantForCausalLM": "jaxspec.models.gemma4_assistant:Gemma4Assistant",
    "Gemma4UnifiedAssistantForCausalLM": "jaxspec.models.gemma4_assistant:Gemma4Assistant",
}


def register_model(architecture: str, model: type[Model]) -> None:
    """Make this process run checkpoints of an architecture by a class (docs/models.md).

    Args:
        architecture: The name in `architectures` of config.json, or its `model_type`.
        model: The class. It may be registered again, also after a notebook defined it anew; engines
            keep the class that they were made with.

    Raises:
        TypeError: `model` is no subclass of `Model`, or lacks one of its methods.
        ValueError: `architecture` is no name, or is that of another model or draft head.
    """
    if not isinstance(architecture, str) or architecture.split() != [architecture]:
        raise ValueError(
            "architecture must be a name as in `architectures` of config.json, got "
            f"{shown(architecture)}. Pass one such as 'MyModelForCausalLM'."
        )
    if not isinstance(model, type) or not issubclass(model, Model):
        raise TypeError(
            f"model must be a subclass of jaxspec.Model, got {shown(model)}. Pass the class, not "
            "an instance or a name."
        )
    if missing := sorted(model.__abstractmethods__):
        raise TypeError(
            f"model must define all methods of jaxspec.Model, and {shown(model)} lacks "
            f"{', '.join(missing)}. docs/models.md has an example."
        )
    taken = MODELS.get(architecture, HEADS.get(architecture))
    if taken is not None and _place_of(taken) != _place_of(model):
        raise ValueError(
            f"architecture must be one that no other class has, and {shown(architecture)} is that "
            f"of {taken}. Give config.json and the model another name."
        )
    MODELS[architecture] = model


def _place_of(model: str | type[Model]) -> str | tuple[str, str]:
    return model if isinstance(model, str) else (model.__module__, model.__qualname__)


def dtype_of(word: str) -> jnp.dtype:
    """Return the weight dtype for the option `word`; "auto" is bfloat16 on a GPU, else float32.

    Raises:
        ValueError: `word` is not 'float32', 'bfloat16' or 'auto'.
    """
    if word == "auto":
        word = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if word not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or 'auto', got {word!r}.")
    return jnp.dtype(word)


def load_model(
    folder: Path | str,
    dtype: jnp.dtype,
    *,
    load_format: str = "auto",
    quantization: str | None = None,
    activation_dtype: str | None = None,
    group: Group = ALONE,
    whole_experts: bool | None = None,
    scales_kv: bool = False,
    progress: bool = False,
) -> Model:
    """Load the model in a checkpoint folder, with weights in `dtype` on the devices of `group`.

    The few parameters whose rounding errors a recurrence would accumulate stay float32.

    Args:
        folder: The checkpoint folder or GGUF file. Needs only config.json with `load_format`
            "dummy".
        dtype: Dtype of the weights.
        load_format: "auto", or "dummy" for random weights.
        quantization: The option of `LLM`.
        activation_dtype: The option of `LLM`.
        group: Devices that share the model; the default device by default.
        whole_experts: Share routed experts as wholes, not by width; see `MoEConfig`.
        scales_kv: Read scales of keys and values that the folder has.
        progress: Show a progress bar on standard error if loading takes long.

    Raises:
        FileNotFoundError, ValueError: As `unread`, or a file changed while it was read.
    """
    options: dict[str, Any] = {"load_format": load_format, "quantization": quantization}
    options |= {"activation_dtype": activation_dtype}
    options |= {"group": group, "whole_experts": whole_experts, "scales_kv": scales_kv}
    with unread(folder, dtype, **options) as found:
        return found.read(progress)


class AbstractModel(NamedTuple, Generic[Some]):
    """A model or draft head whose parameters have shapes and dtypes but no values yet.

    The shapes are those of one device until a group's arrays are read.
    """

    model: Some
    fill: Callable[[bool], None]  # sets the parameters; takes `progress`
    layout: WeightLayout  # places of other weights, once the parameters are set
    of_drafter: DrafterOptions = AS_PUBLISHED  # options of a drafter's weights

    def read(self, progress: bool = False) -> Some:
        """Load the weights to the devices and return the model."""
        self.fill(progress)
        return self.model


@contextlib.contextmanager
def unread(
    folder: Path | str,
    dtype: jnp.dtype,
    *,
    load_format: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    activation_dtype: str | None = None,
    group: Group = ALONE,
    whole_experts: bool | None = None,
    scales_kv: bool = False,
    weights: Mapping[str, Tensor] | None = None,
) -> Iterator[AbstractModel[Model]]:
    """Open the model in a checkpoint folder; its weights can be read until the block ends.

    `overrides` replaces entries of config.json, `quantization` and `activation_dtype` are options
    of `LLM`, and `whole_experts` is that of `MoEConfig`. With `scales_kv`, scales of keys and
    values that the folder has are read. `weights` are tensors by published names in place of those
    of the folder, or leaves of a model.

    Tensor names, shapes and dtypes are checked against config.json. No tensor is read and no device
    memory is allocated before `AbstractModel.read`. The devices of `group` share the model.

    Raises:
        FileNotFoundError: config.json or the weights are missing.
        ValueError: The architecture is not in `MODELS`, an option is not implemented, `load_format`
            is unknown, the weights do not match config.json, `quantization` or `activation_dtype`,
            or the group can't share the model.
    """
    quantised = QuantisedOptions(quantization, activation_dtype)
    asked = _Asked(load_format, overrides, quantised, whole_experts, scales_kv, weights)
    with _unread(folder, dtype, asked, family_of, group) as found:
        quantised.check_held(found.model, Path(folder))
        yield found


@contextlib.contextmanager
def unread_model_or_head(
    folder: Path | str,
    dtype: jnp.dtype,
    *,
    load_format: str = "auto",
    quantised: DrafterOptions = AS_PUBLISHED,
    group: Group = ALONE,
    scales_kv: bool = False,
) -> Iterator[AbstractModel[CheckpointModule]]:
    """Like `unread` for a drafter, whose folder may also hold one of `HEADS`."""
    asked = _Asked(load_format, quantised=quantised, scales_kv=scales_kv)
    with _unread(folder, dtype, asked, _model_or_head, group) as found:
        yield found


class _Asked(NamedTuple):
    """Arguments of `unread`."""

    load_format: str
    overrides: Mapping[str, Any] | None = None
    quantised: QuantisedOptions | DrafterOptions = QuantisedOptions()
    whole_experts: bool | None = None
    scales_kv: bool = False
    weights: Mapping[str, Tensor] | None = None


@contextlib.contextmanager
def _unread(
    folder: Path | str,
    dtype: jnp.dtype,
    asked: _Asked,
    family_of: Callable[[str, Path], type[Some]],
    group: Group,
) -> Iterator[AbstractModel[Some]]:
    if asked.load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be 'auto' or 'dummy', got {asked.load_format!r}.")
    folder = Path(folder)
    with naming(folder):
        fields = read_fields(folder, asked.overrides)
        family = family_of(fields.architecture, folder / "config.json")
        config = sharing_experts(family.parse_config(fields), asked.whole_experts)
        shared = config.local(group.size)
    scheme = fields.scheme()
    quantised = asked.quantised.fitting(scheme, folder)
    rounds = quantised.rounds(scheme, folder)
    dtype = jnp.dtype(dtype)
    given = asked.weights
    if asked.scales_kv and any(name.endswith(".kv_scales") for name in given or ()):  # of leaves
        config = dataclasses.replace(config, scales_kv=True)
        shared = config.local(group.size)
    leaves = None if given is None else tensors_of_leaves(family, config, dtype, given)
    if asked.load_format == "dummy" or leaves:
        whole, model = (undefined(family, sizes, dtype, leaves) for sizes in (config, shared))
        of_ranks = of_devices(whole.checkpoint(), model.checkpoint(), group.size)
        hold_drawn(of_ranks, ROUNDED if rounds else scheme, quantised)
        layout = WeightLayout.of(
            model, dtype, group, scheme, rounds=rounds, scales_kv=asked.scales_kv
        )
        if leaves:
            _check_leaves(config, leaves, layout, rounds=rounds)
        read = _filled_or_drawn(model, layout, given, group)
        yield AbstractModel(model, read, layout, quantised.of_drafter(is_rounded=rounds))
        return
    if asked.weights is not None:
        asked = asked._replace(weights=without_equal_head(family, config, asked.weights))
    with _opened(folder, scheme, family.uses(config), asked) as checkpoint:
        config = with_scales_of(checkpoint, config)
        with giving_sizes(fields, folder):
            whole = compared(family, config, dtype, checkpoint)
        if asked.weights is not None:
            _warn_without_head(config, whole.published)
        shared = config.local(group.size)
        model, of_ranks = whole.on_devices(shared, dtype, checkpoint, group.size)
        published = whole.published
        if rounds := quantised.rounds_tensors(scheme, checkpoint):
            checkpoint = rounding(checkpoint, whole.placements, published)
        if isinstance(checkpoint, QuantisedCheckpoint | RoundedCheckpoint):
            held = hold_as_published(of_ranks, published, checkpoint, quantised)
            by_choice = quantised.dequantises
            log_dequantised(checkpoint, dtype, group.size, held=held.here, by_choice=by_choice)
        layout = WeightLayout.of(
            model, dtype, group, scheme, rounds=rounds, scales_kv=asked.scales_kv
        )
        read = functools.partial(read_weights, model, of_ranks, published, checkpoint, group)
        if asked.weights is not None:
            read = functools.partial(fill, model, layout, asked.weights)
        yield AbstractModel(model, read, layout, quantised.of_drafter(is_rounded=rounds))


def _check_leaves(
    config: ModelConfig, tensors: Collection[str], layout: WeightLayout, *, rounds: bool
) -> None:
    """Refuse leaves of a model whose matrices are in 8 or 4 bits; warn if a head is missing."""
    if rounds or any(layout.forms):
        raise ValueError(
            "weights must be published tensors for a model with weights in 8 or 4 bits, got leaves "
            "of a model. Pass LLM.export_weights(), or keep the model in 16 bits: without "
            "quantization='fp8', or for a quantised folder with quantization='dequantise'."
        )
    _warn_without_head(config, tensors)


def _warn_without_head(config: ModelConfig, tensors: Collection[str]) -> None:
    if config.num_draft_layers and not has_draft_head(config, tensors):
        _LOG.warning(
            "config.json names a draft head, and weights has no %s* tensors: it makes no "
            "drafts, and later updates can't add it. Pass its tensors, too.",
            PREFIX,
        )


def _filled_or_drawn(
    model: CheckpointModule,
    layout: WeightLayout,
    leaves: Mapping[str, Tensor] | None,
    group: Group,
) -> Callable[[bool], None]:
    if leaves is not None:
        return functools.partial(fill, model, layout, leaves)
    return lambda progress: draw_weights(model, group)


def _opened(
    folder: Path, scheme: Scheme | None, is_read: Callable[[str], bool], asked: _Asked
) -> contextlib.AbstractContextManager[Checkpoint]:
    if asked.weights is None:
        return open_checkpoint(folder, scheme, is_read, scales_kv=asked.scales_kv)
    tree = TreeCheckpoint(asked.weights)
    return dequantised(tree, scheme, is_read, scales_kv=asked.scales_kv)


def with_scales_of(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Return the config for scales of keys and values that the checkpoint presents."""
    has_scales = isinstance(checkpoint, QuantisedCheckpoint) and bool(checkpoint.kv_scales)
    return dataclasses.replace(config, scales_kv=True) if has_scales else config


def parse_config(
    published: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Parse the content of a config.json, and of a generation_config.json if given.

    Raises:
        ValueError: The architecture is not in `MODELS`, or a field is missing, malformed or not
            implemented.
    """
    fields = Fields(published, generation)
    return family_of(fields.architecture, "config.json").parse_config(fields)


def family_of(architecture: str, source: Path | str) -> type[Model]:
    """Import and return the model class of an architecture.

    Args:
        architecture: A key of `MODELS`.
        source: The file that names the architecture, for error messages.

    Raises:
        ValueError: The architecture is unknown, or is that of a draft head.
    """
    if architecture in HEADS:
        raise ValueError(
            f"{source} is that of {shown(architecture)}, a head that drafts for a model and is "
            "none itself. Load the model that it was trained for, with speculative_config="
            f'{{"method": "{_imported(HEADS[architecture]).draft_method}", "model": <the folder or '
            "hub id of the head>}."
        )
    if architecture not in MODELS:
        raise ValueError(
            f"{source} asks for the model {shown(architecture)} in `architectures` or "
            f"`model_type`, and jaxspec runs only "
            f"{', '.join(sorted(MODELS))}. Use a checkpoint of one of those, or add the model by "
            "jaxspec.register_model: docs/models.md says how."
        )
    return _imported(MODELS[architecture])


def _model_or_head(architecture: str, source: Path) -> type[CheckpointModule]:
    if architecture in HEADS:
        return _imported(HEADS[architecture])
    return family_of(architecture, source)


def _imported(place: str | type[Model]) -> Any:
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

"""Models: a checkpoint folder or a GGUF file to a `Model`, through one table."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.checks import shown
from jaxspec.models.base import Model, Published
from jaxspec.models.config import ModelConfig
from jaxspec.models.dummy import draw_weights
from jaxspec.models.fields import Fields
from jaxspec.models.hub import resolve_folder
from jaxspec.models.source import naming, open_checkpoint, read_fields
from jaxspec.models.weights import Some, compared, read_weights, undefined

__all__ = [
    "HEADS",
    "MODELS",
    "Unread",
    "dtype_of",
    "family_of",
    "load_model",
    "parse_config",
    "resolve_folder",
    "unread",
    "unread_model_or_head",
]

# `architectures` of config.json, or `model_type` where that is absent -> module:class.
MODELS = {
    "FalconH1ForCausalLM": "jaxspec.models.falcon_h1:FalconH1",
    "falcon_h1": "jaxspec.models.falcon_h1:FalconH1",
    "GraniteMoeHybridForCausalLM": "jaxspec.models.granite:Granite",
    "granitemoehybrid": "jaxspec.models.granite:Granite",
    "Lfm2ForCausalLM": "jaxspec.models.lfm2:LFM2",
    "lfm2": "jaxspec.models.lfm2:LFM2",
    "Lfm2MoeForCausalLM": "jaxspec.models.lfm2:LFM2Moe",
    "lfm2_moe": "jaxspec.models.lfm2:LFM2Moe",
    "LlamaForCausalLM": "jaxspec.models.llama:Llama",
    "llama": "jaxspec.models.llama:Llama",
    "Mamba2ForCausalLM": "jaxspec.models.mamba2:Mamba2",
    "mamba2": "jaxspec.models.mamba2:Mamba2",
    "NemotronHForCausalLM": "jaxspec.models.nemotron_h:NemotronH",
    "nemotron_h": "jaxspec.models.nemotron_h:NemotronH",
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

# Likewise, of heads that draft for a model of another checkpoint.
HEADS = {
    "Eagle3LlamaForCausalLM": "jaxspec.models.eagle3:Eagle3Head",
    "Eagle3Qwen3ForCausalLM": "jaxspec.models.eagle3:Eagle3Head",
    "Eagle3Speculator": "jaxspec.models.eagle3:Eagle3Head",
    "LlamaForCausalLMEagle3": "jaxspec.models.eagle3:Eagle3Head",
}


def dtype_of(word: str) -> jnp.dtype:
    """The dtype of weights when the user says `word`; "auto": bfloat16 on a GPU, else float32.

    Raises:
        ValueError: another word.
    """
    if word == "auto":
        word = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if word not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or 'auto', got {word!r}.")
    return jnp.dtype(word)


def load_model(
    folder: Path | str, dtype: jnp.dtype, *, load_format: str = "auto", progress: bool = False
) -> Model:
    """The model in a checkpoint folder, its weights in `dtype` on the default device.

    The few parameters whose small errors a recurrence would carry along stay float32. With
    `load_format` "dummy" the weights are drawn, and the folder need only hold config.json.
    `progress` shows a bar on standard error if reading takes long.

    Raises:
        FileNotFoundError, ValueError: as `unread`; or a file changed while it was read.
    """
    with unread(folder, dtype, load_format=load_format) as found:
        return found.read(progress)


class Unread(NamedTuple, Generic[Some]):
    """A model, or a head that drafts for one, whose parameters have no values yet."""

    model: Some
    fill: Callable[[bool], None]  # gives them theirs; as `read`

    def read(self, progress: bool = False) -> Some:
        """The model with its weights, on the default device; `progress` as in `load_model`."""
        self.fill(progress)
        self.model.check_values()
        return self.model


@contextlib.contextmanager
def unread(
    folder: Path | str, dtype: jnp.dtype, *, load_format: str = "auto"
) -> Iterator[Unread[Model]]:
    """The model in a checkpoint folder, whose weights may be read until the block ends.

    Their headers are compared with what config.json asks for. No tensor is read before
    `Unread.read`, and no memory of the device is taken.

    Raises:
        FileNotFoundError: config.json or the weights are absent.
        ValueError: an architecture outside `MODELS`, an option that is not implemented, another
            `load_format`, or weights that config.json does not ask for.
    """
    with _unread(folder, dtype, load_format, family_of) as found:
        yield found


@contextlib.contextmanager
def unread_model_or_head(
    folder: Path | str, dtype: jnp.dtype, *, load_format: str = "auto"
) -> Iterator[Unread[Published]]:
    """As `unread`, but the folder may hold one of `HEADS` as well."""
    with _unread(folder, dtype, load_format, _model_or_head) as found:
        yield found


@contextlib.contextmanager
def _unread(
    folder: Path | str,
    dtype: jnp.dtype,
    load_format: str,
    family_of: Callable[[str, Path], type[Some]],
) -> Iterator[Unread[Some]]:
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}.")
    folder = Path(folder)
    fields = read_fields(folder)
    family = family_of(fields.architecture, folder / "config.json")
    with naming(folder):
        config = family.parse_config(fields)
    if load_format == "dummy":
        model = undefined(family, config, jnp.dtype(dtype), None)
        yield Unread(model, lambda progress: draw_weights(model))
        return
    with open_checkpoint(folder) as checkpoint:
        model, placements, published = compared(family, config, jnp.dtype(dtype), checkpoint)
        yield Unread(model, functools.partial(read_weights, placements, published, checkpoint))


def parse_config(
    published: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The configuration in a config.json's content, and in generation_config.json's if given.

    Raises:
        ValueError: an architecture outside `MODELS`, or a field that is missing, malformed or not
            implemented.
    """
    fields = Fields(published, generation)
    return family_of(fields.architecture, "config.json").parse_config(fields)


def family_of(architecture: str, source: Path | str) -> type[Model]:
    """The class of `MODELS`, imported only now; `source` asks for it.

    Raises:
        ValueError: there is none of that name.
    """
    if architecture in HEADS:
        raise ValueError(
            f"{source} is that of {shown(architecture)}, a head that drafts for a model and is "
            "none itself. Load the model that it was trained for, with speculative_config="
            '{"method": "eagle3", "model": <the folder or hub id of the head>}.'
        )
    if architecture not in MODELS:
        raise ValueError(
            f"{source} asks for the model {shown(architecture)}, and jaxspec runs only "
            f"{', '.join(sorted(MODELS))}. Use a checkpoint of one of those, or add the model: "
            "jaxspec/models/README.md says how."
        )
    return _imported(MODELS[architecture])


def _model_or_head(architecture: str, source: Path) -> type[Published]:
    if architecture in HEADS:
        return _imported(HEADS[architecture])
    return family_of(architecture, source)


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)

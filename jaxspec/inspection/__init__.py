"""`inspect`: report of a model, its memory and whether it runs here, without loading it."""

from collections import Counter
from pathlib import Path
from typing import Any

from jaxspec import device
from jaxspec.api.loading import unread_drafter
from jaxspec.api.settling import ResolvedOptions, settle
from jaxspec.cache import Recurrent
from jaxspec.inspection.find import find
from jaxspec.inspection.quantised import Quantised
from jaxspec.inspection.report import Inspection
from jaxspec.inspection.sizes import (
    CacheBytes,
    Fit,
    Parameters,
    cache_bytes,
    fits,
    parameters,
    weight_bytes,
)
from jaxspec.models import dtype_of
from jaxspec.models.base import Model
from jaxspec.models.layers.decoder import DecoderLayer
from jaxspec.options.engine_options import EngineConfig
from jaxspec.parallel import Group
from jaxspec.runner.memory import MemoryBudget

__all__ = ["CacheBytes", "Fit", "Inspection", "Parameters", "Quantised", "inspect"]


def inspect(model: str | Path | None = None, **options: Any) -> Inspection:
    """Report what `LLM(model, **options)` would run, or why it would refuse.

    A folder needs only a config.json. If there are weights, their headers are compared as for
    loading. For a hub id, config.json is downloaded, but not the weights; if the repository has an
    index of the weights, it determines whether there is a draft head. No weight is read, and no
    device memory is used.

    Args:
        model: Checkpoint folder, path of a config.json or of a GGUF file, or hub id. None is the
            embedded model.
        **options: Options of `LLM`.

    Returns:
        The facts found and the reasons for a refusal; `print` it for a report.

    Raises:
        FileNotFoundError: there is no such model.
        TypeError: there is no such option.
        ValueError: an option breaks a rule that does not depend on the model.
    """
    config = EngineConfig.of(model, options)
    dtype = dtype_of(config.dtype)
    group = Group(config.tensor_parallel_size)
    budget = MemoryBudget.of(config.gpu_memory_utilization, config.num_pages, group)
    found = find(config, dtype)
    facts = {} if found.model is None else _facts(found.model)
    settled = None
    if (local := found.local) is not None:
        facts |= _share(local)
        with (
            found.noting(),
            unread_drafter(config, dtype, group, found.of_drafter, progress=False) as drafter,
        ):
            settled = settle(config, local, dtype, drafter and drafter.model, group)
        if settled is not None:
            facts |= _needs(settled)
            facts["fits"] = fits(config, local, settled, budget)
            with found.noting():
                settled.fitting(budget)
    return Inspection(
        model="the embedded model" if model is None else str(model),
        read=found.read,
        refused=tuple(found.refused),
        architecture=found.architecture,
        stored_bytes=found.stored_bytes,
        quantised=found.quantised,
        device=str(device.default_device().device_kind),
        devices=group.size,
        max_bytes=None if budget is None else budget.max_bytes,
        **facts,
    )


def _facts(model: Model) -> dict[str, Any]:
    """Return the fields of `Inspection` that describe the model itself."""
    head = model.draft_head
    return {
        "family": type(model).__name__,
        "layers": dict(Counter(_kinds(layer) for layer in model.trunk.layers)),
        "experts": model.experts,
        "draft_heads": () if head is None else (type(head).__name__,),
        "promised_draft_layers": model.config.num_draft_layers,
        "parameters": parameters(model, model.trunk.checkpoint()),
        "draft_parameters": None if head is None else parameters(model, head.checkpoint()),
    }


def _share(local: Model) -> dict[str, Any]:
    """Return the fields of `Inspection` that describe what one device holds of the model."""
    return {"held_experts": local.experts, "weight_bytes": weight_bytes(local)}


def _kinds(layer: DecoderLayer) -> str:
    """Return the class names of a layer's mixer and feed-forward part."""
    halves = (layer.mixer, layer.feed_forward)
    return " + ".join(type(half).__name__ for half in halves if half is not None)


def _needs(settled: ResolvedOptions) -> dict[str, Any]:
    """Return the fields of `Inspection` that the settled options determine."""
    # Pools of convolution inputs alone have no policy.
    has_states = any(isinstance(spec, Recurrent) for spec in settled.memory_usage.specs)
    return {
        "num_drafts": settled.shapes.num_drafts,
        "kv_dtype": settled.kv_dtype.name,
        "state_policy": settled.states.policy if has_states else None,
        "state_dtype": settled.states.dtype if has_states else None,
        "cache": cache_bytes(settled),
    }

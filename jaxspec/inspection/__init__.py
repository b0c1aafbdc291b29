"""`inspect`: what a model is, what it takes and whether it runs here, without loading it."""

from collections import Counter
from pathlib import Path
from typing import Any

from jaxspec import device
from jaxspec.cache import CacheSpec, Owned, Recurrent
from jaxspec.inspection.find import find
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
from jaxspec.loading import Settled, settle, unread_drafter
from jaxspec.models import dtype_of
from jaxspec.models.base import Model
from jaxspec.models.layers.decoder import DecoderLayer
from jaxspec.options import EngineConfig
from jaxspec.runner.memory import MemoryBudget

__all__ = ["CacheBytes", "Fit", "Inspection", "Parameters", "inspect"]


def inspect(model: str | Path | None = None, **options: Any) -> Inspection:
    """What `LLM(model, **options)` would run, or why it would refuse; `print` it for a report.

    A folder needs no more than a config.json, and `model` may be the path of that file, or of a
    GGUF file. Where there are weights, their headers are compared as they are for loading. A hub
    id's config.json is downloaded, its weights are not; if it has an index of them, that tells
    whether there is a draft head. No tensor is read, and no memory of the device is taken.

    Raises:
        FileNotFoundError: there is no such model.
        TypeError: there is no such option.
        ValueError: an option breaks a rule that has nothing to do with the model.
    """
    config = EngineConfig.of(model, options)
    dtype = dtype_of(config.dtype)
    budget = MemoryBudget.of(config.gpu_memory_utilization, config.num_pages)
    found = find(config, dtype)
    facts = {} if found.model is None else _facts(found.model)
    settled = None
    if found.model is not None:
        with found.noting(), unread_drafter(config, dtype, progress=False) as drafter:
            settled = settle(config, found.model, dtype, drafter and drafter.model)
        if settled is not None:
            facts |= _needs(settled)
            facts["fits"] = fits(config, found.model, settled, budget)
            with found.noting():
                settled.fitting(budget)
    return Inspection(
        model="the embedded model" if model is None else str(model),
        read=found.read,
        refused=tuple(found.refused),
        architecture=found.architecture,
        stored_bytes=found.stored_bytes,
        device=str(device.default_device().device_kind),
        max_bytes=None if budget is None else budget.max_bytes,
        **facts,
    )


def _facts(model: Model) -> dict[str, Any]:
    """What the model is, whatever the options."""
    head = model.draft_head
    return {
        "family": type(model).__name__,
        "layers": dict(Counter(_kinds(layer) for layer in model.trunk.layers)),
        "experts": model.experts,
        "draft_heads": () if head is None else (type(head).__name__,),
        "promised_draft_layers": model.config.num_draft_layers,
        "parameters": parameters(model, model.trunk.checkpoint()),
        "draft_parameters": None if head is None else parameters(model, head.checkpoint()),
        "weight_bytes": weight_bytes(model),
    }


def _kinds(layer: DecoderLayer) -> str:
    """The classes of a layer's halves."""
    halves = (layer.mixer, layer.feed_forward)
    return " + ".join(type(half).__name__ for half in halves if half is not None)


def _needs(settled: Settled) -> dict[str, Any]:
    """What the options became for the model, and what a token and a request take with them."""
    has_states = any(_has_states(spec) for spec in settled.holdings.specs)
    return {
        "num_drafts": settled.shapes.num_drafts,
        "kv_dtype": settled.kv_dtype.name,
        "state_policy": settled.states.policy if has_states else None,
        "state_dtype": settled.states.dtype if has_states else None,
        "cache": cache_bytes(settled),
    }


def _has_states(spec: CacheSpec) -> bool:
    """Whether its pool keeps recurrent states; a convolution's inputs alone have no policy."""
    return isinstance(spec.spec if isinstance(spec, Owned) else spec, Recurrent)

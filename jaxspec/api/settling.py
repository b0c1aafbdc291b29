"""settle: resolve the options that depend on the model or the device, before weights are read."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxspec.api.logits_processors import LogitsProcessors
from jaxspec.cache import CacheSpec, by_slot, kv_dtype_of, unknown
from jaxspec.cache.copies import uncopied
from jaxspec.models.base import CheckpointModule, Model, ModelSpec
from jaxspec.options import SpeculativeConfig
from jaxspec.options.engine_options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.parallel import ALONE, Group
from jaxspec.plan.step_shapes import ModelSizes, SchedulerLimits, StateConfig, StepShapes
from jaxspec.proposers import Proposer, make_proposer
from jaxspec.runner.blocks import check_host_bytes
from jaxspec.runner.memory import MemoryBudget, MemoryUsage, fit
from jaxspec.scheduler.host_drafter import path_length


class ResolvedOptions(NamedTuple):
    """Options resolved for one model on this device.

    Attributes:
        speculation: Speculation options; None means no drafts.
        proposer: Drafts on the device; None without speculation.
        states: Policy and dtype of recurrent states.
        kv_dtype: Dtype of the KV cache.
        shapes: Sizes of the programs; `num_pages` is an upper bound (see `fitting`).
        limits: Limits of the scheduler.
        memory_usage: Bytes of each device's memory by use.
        group: Devices that share the model.
        processors: Logits processors.
    """

    speculation: SpeculativeConfig | None
    proposer: Proposer | None
    states: StateConfig
    kv_dtype: jnp.dtype
    shapes: StepShapes
    limits: SchedulerLimits
    memory_usage: MemoryUsage
    group: Group
    processors: LogitsProcessors = LogitsProcessors()

    def fitting(self, budget: MemoryBudget | None) -> StepShapes:
        """Return the shapes with as many pages as fit.

        Args:
            budget: Device memory to use; None means unlimited.

        Raises:
            ValueError: as in `fit` and `check_host_bytes`.
        """
        share, usage = self.limits.prefix_cache_share, self.memory_usage
        shapes = fit(self.shapes, share, budget, usage.bytes)
        check_host_bytes(usage.specs, shapes, self.limits.host_bytes, self.group)
        return shapes


def sizes_of(
    config: EngineConfig, model: Model, draft_buckets: Sequence[int]
) -> tuple[StepShapes, SchedulerLimits]:
    """Return the sizes of the model's programs, `num_pages` as an upper bound, and the limits.

    Args:
        config: Options of the engine.
        model: The model.
        draft_buckets: Numbers of drafts per step to compile programs for.

    Raises:
        ValueError: sizes are inconsistent, or exceed the model's.
    """
    own = ModelSizes(model.max_position_embeddings, model.tokens_per_step, model.steps_per_dispatch)
    shapes, limits = config.sizes(own, draft_buckets)
    return dataclasses.replace(shapes, vocab_size=model.vocab_size), limits


def settle(
    config: EngineConfig,
    model: Model,
    dtype: jnp.dtype,
    drafter: CheckpointModule | None = None,
    group: Group = ALONE,
) -> ResolvedOptions:
    """Resolve all options that depend on the model or the device.

    Args:
        config: Options of the engine.
        model: The model; its parameters may be abstract.
        dtype: Dtype of the weights.
        drafter: Model or head that drafts, likewise; None without one.
        group: Devices that share the model.

    Raises:
        ValueError: an option is not supported by the model, or sizes are inconsistent.
    """
    speculation = SpeculativeConfig.resolve(config.speculative_config, model.has_draft_head)
    has_kernels = dispatch.kernels_here()[1] is None
    speculation = speculation and speculation.on_device(has_kernels)
    model_spec = None if drafter is None else ModelSpec.of(drafter, dtype)
    proposer = make_proposer(speculation, model, model_spec) if speculation else None
    policy = config.state_policy
    if config.deterministic and policy == "auto":
        policy = "snapshot"
    states = StateConfig.resolve(policy, config.state_dtype, has_kernels=has_kernels)
    kv_dtype = kv_dtype_of(config.kv_dtype, dtype)
    counts = speculation.draft_buckets if speculation else (0,)
    shapes, limits = sizes_of(config, model, counts)
    ahead = path_length(speculation, config.max_in_flight, shapes.steps_per_dispatch)
    processors = LogitsProcessors.of(config.logits_processors, model.vocab_size)
    memory_usage = MemoryUsage.of(
        model,
        proposer,
        drafter,
        dtype=dtype,
        kv_dtype=kv_dtype,
        states=states,
        group=group,
        processors=processors.device,
        routes=config.enable_return_routed_experts,
    )
    limits = dataclasses.replace(limits, **prefix_sizes(config, memory_usage.specs))
    shapes = dataclasses.replace(shapes, path_length=ahead, **processors.sizes(shapes.width))
    return ResolvedOptions(
        speculation, proposer, states, kv_dtype, shapes, limits, memory_usage, group, processors
    )


def prefix_sizes(config: EngineConfig, specs: Sequence[CacheSpec]) -> dict[str, Any]:
    """Return the fields of `SchedulerLimits` that configure prefix caching.

    Args:
        config: Options of the engine.
        specs: Specs of all pools.

    Raises:
        ValueError: recurrent states have no memory, the checkpoint interval does not match the page
            size, a pool can't be cached or copied to the host, or host memory is given without
            prefix caching.
    """
    sizes = _device_sizes(config, specs)
    if not config.kv_offloading_size:
        return sizes
    if not sizes:
        raise ValueError(
            f"kv_offloading_size={config.kv_offloading_size} is for prefixes, and this engine "
            "caches none. Set enable_prefix_caching=True and a mamba_cache_mode other than 'none', "
            "or kv_offloading_size=0."
        )
    if strange := uncopied(specs):
        raise ValueError(
            "Prefixes can be copied to host memory if every pool has an axis of pages "
            f"(`page_axis`) or is a `jaxspec.cache.BySlot`, and {', '.join(strange)} does neither. "
            "Set kv_offloading_size=0."
        )
    return sizes | {"host_bytes": int(config.kv_offloading_size * 2**30)}


def _device_sizes(config: EngineConfig, specs: Sequence[CacheSpec]) -> dict[str, Any]:
    has_states, strange = bool(by_slot(specs)), unknown(specs)
    wanted = config.enable_prefix_caching
    if strange and wanted:
        raise ValueError(
            f"Prefixes can be cached if every pool has pages or can copy a slot "
            f"(`jaxspec.cache.BySlot`), and {', '.join(strange)} does neither. Set "
            "enable_prefix_caching=False; or, in a spec that copies pages alone, `by_page = True` "
            "or a `page_axis`."
        )
    if strange or wanted is False:
        return {}
    if not has_states:
        return {"prefix_caching": "pages"}
    mode, interval = config.mamba_cache_mode, config.checkpoint_interval
    if mode == "none":  # cached keys and values need the recurrent states of the same prefix
        return {}
    if config.prefix_cache_share == 0:
        raise ValueError(
            "prefix_cache_share must be above 0 for a model with recurrent states, or there is "
            "nothing to begin on; got 0. Use 0.2, or enable_prefix_caching=False."
        )
    if mode == "align":
        interval = interval or 32 * config.page_size
        if interval % config.page_size:
            raise ValueError(
                f"checkpoint_interval must be a multiple of page_size={config.page_size} with "
                f"mamba_cache_mode='align', got {interval}. Round it, or use 'all'."
            )
    return {
        "prefix_caching": mode,
        "prefix_cache_share": config.prefix_cache_share,
        "checkpoint_interval": interval,
    }

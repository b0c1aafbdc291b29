"""What the options mean for prefixes that are kept: which, where, and in how much memory."""

from collections.abc import Sequence
from typing import Any

from jaxspec.cache import CacheSpec, by_slot, unknown
from jaxspec.cache.copies import uncopied
from jaxspec.files import writable_folder
from jaxspec.options import EngineConfig
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.scheduler.disk_tier import DiskTier
from jaxspec.scheduler.host_tier import HostTier


def prefix_sizes(config: EngineConfig, specs: Sequence[CacheSpec]) -> dict[str, Any]:
    """The fields of `StepShapes` that say what is kept of requests for those to come.

    Raises:
        ValueError: states are to be kept without memory for them or off the pages' grid, nobody
            knows how to keep a pool, or nothing is kept that the host's memory is for.
    """
    sizes = _kept_on_device(config, specs)
    if not config.kv_offloading_size:
        return sizes
    if not sizes:
        raise ValueError(
            f"kv_offloading_size={config.kv_offloading_size} is for prefixes, and this engine "
            "keeps none. Set enable_prefix_caching=True and a mamba_cache_mode other than 'none', "
            "or kv_offloading_size=0."
        )
    if strange := uncopied(specs):
        raise ValueError(
            "Prefixes can go to the host's memory where every pool says what its axis of pages is "
            f"(`page_axis`) or is a `jaxspec.cache.BySlot`, and {', '.join(strange)} does neither. "
            "Set kv_offloading_size=0."
        )
    return sizes | {"host_bytes": int(config.kv_offloading_size * 2**30)}


def _kept_on_device(config: EngineConfig, specs: Sequence[CacheSpec]) -> dict[str, Any]:
    has_states, strange = bool(by_slot(specs)), unknown(specs)
    wanted = config.enable_prefix_caching
    if strange and wanted:
        raise ValueError(
            f"Prefixes can be kept where every pool lies in pages or says how to keep a slot of it "
            f"(`jaxspec.cache.BySlot`), and {', '.join(strange)} does neither. Set "
            "enable_prefix_caching=False; or, in a spec that copies pages alone, `by_page = True` "
            "or a `page_axis`."
        )
    if strange or wanted is False:
        return {}
    if not has_states:
        return {"prefix_caching": "pages"}
    mode, interval = config.mamba_cache_mode, config.checkpoint_interval
    if mode == "none":  # keys and values without the states of their tokens would be wrong
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


def host_tier(config: EngineConfig, runner: ModelRunner) -> HostTier | None:
    """What keeps in the host's memory what the runner's device gives up; None: nothing does.

    Raises:
        ValueError: the folder for the files of it is none.
    """
    shapes, pieces, disk = runner.shapes, runner.pieces, None
    has_states = shapes.num_checkpoints > 0
    if not shapes.host_bytes:
        return None
    if config.kv_offloading_folder is not None:
        name, purpose = str(config.kv_offloading_folder), "Kept prefixes are written to"
        kinds = (False, True) if has_states else (False,)
        disk = DiskTier(
            writable_folder(name, purpose, mode=0o700),
            int(config.kv_offloading_folder_size * 2**30),
            runner.fingerprint,
            shapes.page_size,
            {kind: pieces.arrays(is_state=kind) for kind in kinds},
        )
    return HostTier(shapes.host_bytes, shapes.page_size, pieces, disk, has_states=has_states)

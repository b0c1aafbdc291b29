"""Model loading: resolve all options, read the checkpoint, and create the runner.

    EngineConfig ─▶ folder_of ─▶ unread model ─▶ settle: ResolvedOptions ─▶ fitting: pages
                                                                                   │
    Loaded ◀─ ModelRunner ◀─ read weights, trace first programs meanwhile ◀─ Blueprint

Options and configuration are validated before a tensor is read.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.api.inputs import end_ids
from jaxspec.api.logits_processors import LogitsProcessors
from jaxspec.api.nodes import Node, join
from jaxspec.api.settling import ResolvedOptions, settle
from jaxspec.api.weight_updates import Layouts
from jaxspec.checks import shown
from jaxspec.files import writable_folder
from jaxspec.gguf import is_gguf
from jaxspec.grammar import Matchers
from jaxspec.hidden_states.recorder import HiddenStateRecorder
from jaxspec.hidden_states.state_file import prepare_folder
from jaxspec.models import AbstractModel, dtype_of, resolve_folder, unread, unread_model_or_head
from jaxspec.models.base import CheckpointModule, Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.quantised.option import DrafterOptions
from jaxspec.models.trees.checkpoint import Tensor
from jaxspec.options import SpeculativeConfig
from jaxspec.options.draft_methods import ExtractHiddenStatesOptions
from jaxspec.options.engine_options import EngineConfig
from jaxspec.options.generation_config import default_params
from jaxspec.parallel import Group
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.prefix.disk_tier import DiskTier
from jaxspec.prefix.host_tier import HostTier
from jaxspec.proposers import Proposer
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.memory import MemoryBudget
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.page_reader import RouteRecorder
from jaxspec.runner.programs.compilation_cache import enable_compilation_cache
from jaxspec.runner.warmup import first_programs
from jaxspec.sampling import make_verifier
from jaxspec.scheduler.host_drafter import HostDrafter, make_host_drafter
from jaxspec.scheduler.request_observer import RequestObserver
from jaxspec.text.tokenizer import Tokenizer


def host_tier(config: EngineConfig, host_bytes: int, runner: ModelRunner) -> HostTier | None:
    """Return the store for prefixes evicted from the device.

    Args:
        config: Options of the engine.
        host_bytes: Memory of the tier; 0 means none.
        runner: The runner, which copies the blocks.

    Returns:
        The host tier, or None without host memory for prefixes.

    Raises:
        ValueError: the folder for its files is not a writable folder.
    """
    shapes, pieces, disk = runner.shapes, runner.blocks, None
    if not host_bytes:
        return None
    if config.kv_offloading_folder is not None:
        name, purpose = str(config.kv_offloading_folder), "Cached prefixes are written to"
        kinds = (False, True) if shapes.num_checkpoints else (False,)
        disk = DiskTier(
            writable_folder(name, purpose, mode=0o700),
            int(config.kv_offloading_folder_size * 2**30),
            runner.fingerprint,
            shapes.page_size,
            {kind: pieces.arrays(is_state=kind) for kind in kinds},
        )
    return HostTier(shapes, host_bytes, pieces, disk)


EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded"


class Loaded(NamedTuple):
    """A model ready to run.

    Attributes:
        folder: Folder or GGUF file of the checkpoint.
        model: Configuration of the model.
        speculation: Speculation options; None means no drafts.
        proposer: Drafts on the device; None without speculation.
        runner: Runs the programs.
        limits: Limits of the scheduler.
        host_drafter: Follows requests on the host, and drafts there for some methods.
        host_tier: Store for prefixes evicted from the device; None without one.
        tokenizer: The tokenizer; None without one.
        matchers: Creates the matchers of requests with a grammar.
        default_params: Parameters of calls without any.
        config: Options of the engine, with resolved "auto" and None.
        processors: Logits processors.
        layouts: Places of other weights.
    """

    folder: Path
    model: ModelConfig
    speculation: SpeculativeConfig | None
    proposer: Proposer | None
    runner: ModelRunner
    limits: SchedulerLimits
    host_drafter: HostDrafter | None
    host_tier: HostTier | None
    tokenizer: Tokenizer | None
    matchers: Matchers
    default_params: SamplingParams
    config: EngineConfig
    processors: LogitsProcessors
    layouts: Layouts
    observers: tuple[RequestObserver, ...] = ()


def folder_of(config: EngineConfig, *, progress: bool, weights: bool) -> Path:
    """Return the folder or GGUF file of the model, downloading it if it is a hub id.

    Args:
        config: Options of the engine.
        progress: Show a progress bar.
        weights: Download the weights, too.

    Raises:
        FileNotFoundError: the model does not exist.
        ValueError: as in `resolve_folder`.
    """
    if config.model is None:
        return EMBEDDED_MODEL
    return resolve_folder(config.model, progress, weights=weights, revision=config.revision)


def _tokenizer(config: EngineConfig, folder: Path, *, progress: bool) -> Tokenizer | None:
    """Load the tokenizer of `config`, or that of the model's folder if there is one.

    Raises:
        FileNotFoundError: the tokenizer given in `config` does not exist.
        ValueError: the tokenizer is invalid.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        try:
            return Tokenizer(resolve_folder(config.tokenizer, progress, weights=False))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"tokenizer: {error}") from error
    try:
        return Tokenizer(folder)
    except FileNotFoundError:  # prompts and outputs are token ids only
        return None


@contextlib.contextmanager
def unread_drafter(
    config: EngineConfig,
    dtype: jnp.dtype,
    group: Group,
    quantised: DrafterOptions,
    *,
    progress: bool,
) -> Iterator[AbstractModel[CheckpointModule] | None]:
    """Open the drafter's checkpoint, a model or a draft head, without reading its weights.

    Args:
        config: Options of the engine.
        dtype: Dtype of the weights.
        group: Devices that share the drafter.
        quantised: Options of its weights (`AbstractModel.of_drafter`).
        progress: Show progress bars.

    Yields:
        The drafter, or None if the draft method has no checkpoint.

    Raises:
        FileNotFoundError, ValueError: as in `folder_of` and `unread_model_or_head`.
    """
    speculation = config.speculative_config
    options = speculation.options if isinstance(speculation, SpeculativeConfig) else None
    name = getattr(options, "model", None)
    if options is None or name is None:
        yield None
        return
    has_weights = config.load_format != "dummy"
    folder = resolve_folder(name, progress, weights=has_weights, revision=options.revision)
    with unread_model_or_head(
        folder,
        dtype,
        load_format=config.load_format,
        quantised=quantised,
        group=group,
        scales_kv=config.scales_kv,
    ) as found:
        yield found


def load(
    config: EngineConfig, *, progress: bool, weights: Mapping[str, Tensor] | None = None
) -> Loaded:
    """Load the model of an engine and allocate its state, with the recorders of its requests.

    Args:
        config: Options of the engine.
        progress: Show progress bars.
        weights: Tensors in place of those of the checkpoint.

    Returns:
        The model, ready to run; no program is compiled yet.

    Raises:
        FileNotFoundError: as in `load_runner`.
        ValueError: the folder for hidden states can't be used, or as in `load_runner`.
    """
    if config.node_rank:
        raise ValueError(
            f"An LLM or a server is node 0 of its group, got node_rank={config.node_rank}. Call "
            "jaxspec.follow with these options, or run `jaxspec serve` with them."
        )
    options, observers = getattr(config.speculative_config, "options", None), []
    saves_states = isinstance(options, ExtractHiddenStatesOptions)
    if saves_states:
        prepare_folder(str(options.folder))
    loaded = load_runner(config, progress=progress, weights=weights)
    if saves_states:
        name = "the embedded model" if config.model is None else str(config.model)
        observers.append(HiddenStateRecorder.of(options, loaded.runner, name))
    if config.enable_return_routed_experts:
        observers.append(RouteRecorder(loaded.runner))
    return loaded._replace(observers=tuple(observers))


def load_runner(
    config: EngineConfig, *, progress: bool, weights: Mapping[str, Tensor] | None = None
) -> Loaded:
    """Load the model and allocate its state, without a recorder of hidden states.

    A flight replay calls this directly: it has no requests and writes no files.

    Args:
        config: Options of the engine.
        progress: Show progress bars.
        weights: As in `load`.

    Returns:
        The model, ready to run; no program is compiled yet.

    Raises:
        FileNotFoundError: the model does not exist, or its folder has no configuration or weights.
        ValueError: an option, the configuration or the weights are invalid, or do not fit into
            memory.
        OSError: other nodes can't be reached (`join`).
    """
    import_plugin(config.model_plugin)
    enable_compilation_cache(config.compilation_cache)
    has_files = config.load_format != "dummy" and weights is None
    folder = folder_of(config, progress=progress, weights=has_files)
    if weights is not None:
        _check_given(config, folder)
    node = join(config, folder, progress=progress)
    with node.loading():
        return _loaded(config, folder, node, weights, progress=progress)


def import_plugin(module: str | None) -> None:
    """Import the module that registers the model's architecture, in each process of an engine.

    Args:
        module: Name of the module; None does nothing.

    Raises:
        ValueError: it can't be imported.
    """
    if module is None:
        return
    try:
        importlib.import_module(module)
    except Exception as error:  # importing runs arbitrary code of the module
        raise ValueError(
            f"model_plugin must be a module that can be imported, got {shown(module)}: "
            f"{type(error).__name__}: {error}. Install it, or put its folder on PYTHONPATH."
        ) from error


def _check_given(config: EngineConfig, folder: Path) -> None:
    """Refuse options that contradict weights from memory."""
    wrong = {
        "load_format='dummy' draws weights": config.load_format == "dummy",
        f"{folder} is a GGUF file, and its tensors are converted": is_gguf(folder),
        f"nnodes={config.nnodes} needs them in each process": config.nnodes > 1,
    }
    for reason in (reason for reason, holds in wrong.items() if holds):
        raise ValueError(
            f"weights from memory need the folder or hub id of a published model, in one process, "
            f"and {reason}. Leave out one of the two."
        )


def _unread_model(
    config: EngineConfig,
    folder: Path,
    dtype: jnp.dtype,
    group: Group,
    weights: Mapping[str, Tensor] | None,
) -> contextlib.AbstractContextManager[AbstractModel[Model]]:
    return unread(
        folder,
        dtype,
        load_format=config.load_format,
        overrides=config.hf_overrides,
        quantization=config.quantization,
        activation_dtype=config.activation_dtype,
        group=group,
        whole_experts=config.enable_expert_parallel,
        scales_kv=config.scales_kv,
        weights=weights,
    )


def _loaded(
    config: EngineConfig,
    folder: Path,
    node: Node,
    weights: Mapping[str, Tensor] | None,
    *,
    progress: bool,
) -> Loaded:
    tokenizer = _tokenizer(config, folder, progress=progress)
    defaults = default_params(config.generation_config, folder)
    dtype = dtype_of(config.dtype)
    # Measured before anything is loaded: the budget is the memory that other engines leave free.
    group = Group.of(config.tensor_parallel_size, config.nnodes)
    budget = node.agreed(MemoryBudget.of(config.gpu_memory_utilization, config.num_pages, group))
    with contextlib.ExitStack() as failed:
        with (
            _unread_model(config, folder, dtype, group, weights) as found,
            unread_drafter(
                config, dtype, group, found.of_drafter, progress=progress
            ) as found_drafter,
        ):
            matchers = _matchers(tokenizer, found.model.config)
            head = found_drafter and found_drafter.model
            settled = settle(config, found.model, dtype, head, group)
            shapes = settled.fitting(budget)
            blueprint = _blueprint(found.model, shapes, settled, dtype, head, group, config)
            early = blueprint.trace_early(
                first_programs(shapes, settled.limits) if config.background_compilation else ()
            )
            failed.callback(early.close)
            model = found.read(progress)
            drafter = found_drafter and found_drafter.read(progress)
        runner = node.runner(model, blueprint, drafter=drafter, early=early)
        tier = host_tier(config, settled.limits.host_bytes, runner)
        failed.pop_all()
    return Loaded(
        folder=folder,
        model=model.config,
        speculation=settled.speculation,
        proposer=settled.proposer,
        runner=runner,
        limits=settled.limits,
        host_drafter=make_host_drafter(settled.speculation),
        host_tier=tier,
        tokenizer=tokenizer,
        matchers=matchers,
        default_params=defaults,
        config=_resolved(config, settled, runner.shapes, dtype),
        processors=settled.processors,
        layouts=Layouts(found.layout, found_drafter and found_drafter.layout),
    )


def _blueprint(
    model: Model,
    shapes: StepShapes,
    settled: ResolvedOptions,
    dtype: jnp.dtype,
    drafter: CheckpointModule | None,
    group: Group,
    config: EngineConfig,
) -> Blueprint:
    return Blueprint.of(
        model,
        shapes,
        settled.proposer,
        dtype=dtype,
        verifier=make_verifier(settled.speculation),
        states=settled.states,
        kv_dtype=settled.kv_dtype,
        drafter=drafter,
        group=group,
        processors=settled.processors.device,
        routes=settled.memory_usage.options.routes,
        is_deterministic=config.deterministic,
    )


def _matchers(tokenizer: Tokenizer | None, model: ModelConfig) -> Matchers:
    """Begin to read the vocabulary for grammars, which takes seconds if it is large."""
    ends = end_ids(model.eos_token_ids, tokenizer, model.vocab_size)
    matchers = Matchers(tokenizer, model.vocab_size, ends)
    matchers.start()
    return matchers


def _resolved(
    config: EngineConfig, settled: ResolvedOptions, shapes: StepShapes, dtype: jnp.dtype
) -> EngineConfig:
    return dataclasses.replace(
        config,
        dtype=dtype.name,
        state_policy=settled.states.policy,
        num_pages=shapes.num_pages,
        max_num_batched_tokens=settled.limits.max_num_batched_tokens,
        prefill_buckets=shapes.prefill_tokens,
        max_prefill_seqs=shapes.max_prefill_seqs,
        enable_prefix_caching=settled.limits.caches_prefixes,
        checkpoint_interval=settled.limits.checkpoint_interval or config.checkpoint_interval,
        steps_per_dispatch=shapes.steps_per_dispatch,
        speculative_config=settled.speculation,
    )

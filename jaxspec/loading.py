"""Options to what runs them: the checkpoint's folder, its configuration, and the runner."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.cache import kv_dtype_of
from jaxspec.config import ModelSizes, StateConfig, StepShapes
from jaxspec.extraction.follower import HiddenStateFollower
from jaxspec.extraction.state_file import prepare_folder
from jaxspec.generation_config import default_params
from jaxspec.models import Unread, dtype_of, resolve_folder, unread, unread_model_or_head
from jaxspec.models.base import Model, ModelRecipe, Published
from jaxspec.models.config import ModelConfig
from jaxspec.options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.prefixes import host_tier, prefix_sizes
from jaxspec.proposers import Proposer, make_proposer
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.memory import Holdings, MemoryBudget, fit
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.pieces import check_host_bytes
from jaxspec.runner.programs.compilation_cache import enable_compilation_cache
from jaxspec.runner.warmup import first_programs
from jaxspec.sampling import make_verifier
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.host_drafter import HostDrafter, make_host_drafter, path_length
from jaxspec.scheduler.host_tier import HostTier
from jaxspec.speculation import SpeculativeConfig
from jaxspec.speculation.extract_hidden_states import ExtractHiddenStatesOptions
from jaxspec.tokenizer import Tokenizer

EMBEDDED_MODEL = Path(__file__).parent / "embedded"


class Loaded(NamedTuple):
    """A model ready to run."""

    folder: Path  # of the checkpoint
    model: ModelConfig
    speculation: SpeculativeConfig | None
    proposer: Proposer | None
    runner: ModelRunner
    host_drafter: HostDrafter
    host_tier: HostTier | None  # of prefixes
    tokenizer: Tokenizer | None
    default_params: SamplingParams  # of a call that brings none
    config: EngineConfig  # with every "auto" and None that the device decided resolved


def folder_of(config: EngineConfig, *, progress: bool, weights: bool) -> Path:
    """The folder or GGUF file of the model that `config` names, downloaded if it is a hub id.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: as `resolve_folder`.
    """
    if config.model is None:
        return EMBEDDED_MODEL
    return resolve_folder(config.model, progress, weights=weights, revision=config.revision)


def _tokenizer(config: EngineConfig, folder: Path, *, progress: bool) -> Tokenizer | None:
    """The tokenizer that `config` names, or that of the model's `folder`; None: there is none.

    Raises:
        FileNotFoundError: there is none where `config` says.
        ValueError: it is broken.
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
    except FileNotFoundError:  # then token ids go in, and come out alone
        return None


@contextlib.contextmanager
def unread_drafter(
    config: EngineConfig, dtype: jnp.dtype, *, progress: bool
) -> Iterator[Unread[Published] | None]:
    """The checkpoint that the speculation names beside the model's; None: it names none.

    It is a model or a head, as `unread_model_or_head` finds it.

    Raises:
        FileNotFoundError, ValueError: as `folder_of` and `unread_model_or_head`.
    """
    speculation = config.speculative_config
    options = speculation.options if isinstance(speculation, SpeculativeConfig) else None
    name = getattr(options, "model", None)
    if options is None or name is None:
        yield None
        return
    has_weights = config.load_format != "dummy"
    folder = resolve_folder(name, progress, weights=has_weights, revision=options.revision)
    with unread_model_or_head(folder, dtype, load_format=config.load_format) as found:
        yield found


class Settled(NamedTuple):
    """What the options mean for one model on this device."""

    speculation: SpeculativeConfig | None
    proposer: Proposer | None
    states: StateConfig
    kv_dtype: jnp.dtype
    shapes: StepShapes
    holdings: Holdings

    def fitting(self, budget: MemoryBudget | None) -> StepShapes:
        """The shapes with as many pages as fit; ValueError as in `fit` and `check_host_bytes`."""
        shapes = fit(self.shapes, budget, self.holdings.bytes)
        check_host_bytes(self.holdings.specs, shapes)
        return shapes


def shapes_of(config: EngineConfig, model: Model, draft_counts: Sequence[int]) -> StepShapes:
    """The sizes of programs for the model, before it is known how many pages fit.

    Raises:
        ValueError: sizes do not go together, or exceed the model's.
    """
    own = ModelSizes(model.max_position_embeddings, model.tokens_per_step, model.steps_per_dispatch)
    sizes = config.step_shapes(own, draft_counts)
    return dataclasses.replace(sizes, vocab_size=model.vocab_size)


def settle(
    config: EngineConfig, model: Model, dtype: jnp.dtype, drafter: Published | None = None
) -> Settled:
    """The options with every "auto" and None that the model or the device decides decided.

    The parameters of the model and of its `drafter` need no values.

    Raises:
        ValueError: an option does not go with the model, or sizes do not go together.
    """
    speculation = SpeculativeConfig.resolve(config.speculative_config, model.has_draft_head)
    has_kernels = dispatch.kernels_here()[1] is None
    speculation = speculation and speculation.on_device(has_kernels)
    recipe = None if drafter is None else ModelRecipe.of(drafter, dtype)
    proposer = make_proposer(speculation, model, recipe) if speculation else None
    states = StateConfig.resolve(config.state_policy, config.state_dtype, has_kernels=has_kernels)
    kv_dtype = kv_dtype_of(config.kv_dtype, dtype)
    counts = speculation.draft_counts if speculation else (0,)
    shapes = shapes_of(config, model, counts)
    ahead = path_length(speculation, config.max_in_flight, shapes.steps_per_dispatch)
    holdings = Holdings.of(model, proposer, drafter, dtype=dtype, kv_dtype=kv_dtype, states=states)
    kept = prefix_sizes(config, holdings.specs)
    shapes = dataclasses.replace(shapes, path_length=ahead, **kept)
    return Settled(speculation, proposer, states, kv_dtype, shapes, holdings)


def load(config: EngineConfig, *, progress: bool) -> Loaded:
    """A model ready to run, and who follows its requests, as `config` says it.

    Whatever can be refused is refused before a tensor is read.

    Raises:
        FileNotFoundError, ValueError: as in `load_runner`, or nothing can be saved where it shall.
    """
    options = getattr(config.speculative_config, "options", None)
    if not isinstance(options, ExtractHiddenStatesOptions):
        return load_runner(config, progress=progress)
    prepare_folder(str(options.folder))
    loaded = load_runner(config, progress=progress)
    name = "the embedded model" if config.model is None else str(config.model)
    return loaded._replace(host_drafter=HiddenStateFollower.of(options, loaded.runner, name))


def load_runner(config: EngineConfig, *, progress: bool) -> Loaded:
    """Load the model that `config` names and allocate its state; no program is compiled yet.

    A replay needs no more: it has no requests, and writes no files.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        ValueError: an option, the configuration or the weights break a rule, or do not fit.
    """
    enable_compilation_cache(config.compilation_cache)
    folder = folder_of(config, progress=progress, weights=config.load_format != "dummy")
    tokenizer = _tokenizer(config, folder, progress=progress)
    defaults = default_params(config.generation_config, folder)
    dtype = dtype_of(config.dtype)
    is_background = config.background_compilation
    # Taken before anything is loaded: the budget is what other engines leave.
    budget = MemoryBudget.of(config.gpu_memory_utilization, config.num_pages)
    with contextlib.ExitStack() as failed:
        with (
            unread(folder, dtype, load_format=config.load_format) as found,
            unread_drafter(config, dtype, progress=progress) as found_drafter,
        ):
            head = found_drafter and found_drafter.model
            settled = settle(config, found.model, dtype, head)
            shapes = settled.fitting(budget)
            blueprint = Blueprint.of(
                found.model,
                shapes,
                settled.proposer,
                dtype=dtype,
                verifier=make_verifier(settled.speculation),
                states=settled.states,
                kv_dtype=settled.kv_dtype,
                drafter=head,
            )
            early = blueprint.trace_early(first_programs(shapes) if is_background else ())
            failed.callback(early.close)
            model = found.read(progress)
            drafter = found_drafter and found_drafter.read(progress)
        runner = ModelRunner(model, blueprint, drafter=drafter, early=early)
        tier = host_tier(config, runner)
        failed.pop_all()
    return Loaded(
        folder=folder,
        model=model.config,
        speculation=settled.speculation,
        proposer=settled.proposer,
        runner=runner,
        host_drafter=make_host_drafter(settled.speculation),
        host_tier=tier,
        tokenizer=tokenizer,
        default_params=defaults,
        config=_resolved(config, settled, runner.shapes, dtype),
    )


def _resolved(
    config: EngineConfig, settled: Settled, shapes: StepShapes, dtype: jnp.dtype
) -> EngineConfig:
    return dataclasses.replace(
        config,
        dtype=dtype.name,
        state_policy=settled.states.policy,
        num_pages=shapes.num_pages,
        max_num_batched_tokens=shapes.max_num_batched_tokens,
        prefill_buckets=shapes.prefill_tokens,
        max_prefill_seqs=shapes.max_prefill_seqs,
        enable_prefix_caching=shapes.prefix_caching != "off",
        checkpoint_interval=shapes.checkpoint_interval or config.checkpoint_interval,
        steps_per_dispatch=shapes.steps_per_dispatch,
        speculative_config=settled.speculation,
    )

"""`LLMEngine`: the loaded model, session and tokenizer of `LLM` and `AsyncLLM`."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxspec.api.engine_args import EngineArgs
from jaxspec.api.inputs import InputProcessor
from jaxspec.api.loading import Loaded, load
from jaxspec.api.pausing import Pausing
from jaxspec.api.weight_updates import check_version
from jaxspec.checks import integer, shown
from jaxspec.engine.engine import Engine
from jaxspec.engine.request_histograms import RequestHistograms
from jaxspec.engine.session import Session
from jaxspec.flight.about import about
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.models.trees.checkpoint import named_arrays
from jaxspec.options.engine_options import EngineConfig
from jaxspec.options.vllm_options import check_call
from jaxspec.process import check_process, first_process
from jaxspec.requests.outputs import RequestOutput, Sample
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.request import INT32_MAX
from jaxspec.requests.sampling_features import LADDER, features_named
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.runner.compiler import Compiler
from jaxspec.runner.warmup import Notice
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.text.tokenizer import Tokenizer

Kind = str | SamplingParams
RPC_METHODS = (
    *("reset_prefix_cache", "start_profile", "stop_profile"),
    *("get_metrics", "metrics", "warm_up", "get_ready"),
)
"""Methods that `LLMEngine.collective_rpc` calls."""


class LLMEngine(Pausing):
    """Loaded model with its session and tokenizer. Thread-safe.

    Compiles the programs that samples need. `LLM` and `AsyncLLM` step the session; `add_request`
    and `step` are for scripts with a loop of their own, as in vLLM.

    Attributes:
        session: The session that runs the samples.
        shapes: Sizes of the engine's programs, including the number of pages.
        limits: Limits of the engine's scheduler.
        model_name: The model as it was given, or the folder name of the embedded model.
        inputs: Creates samples from prompts.
        tokenizer: The model's tokenizer; None if it has none.
        vocab_size: Number of token ids.

    Raises:
        FileNotFoundError: the model does not exist, or its folder has no configuration or weights.
        TypeError: an option is unknown.
        ValueError: an option, the configuration or the weights are invalid, or do not fit into
            memory.
        RuntimeError: this is a forked child of a process that made an LLM.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        weights: Any = None,
        weight_version: str = "0",
        **options: Any,
    ):
        """Load the model and allocate its state; programs are compiled when first needed.

        Args:
            model: A folder, a GGUF file or a hub id; None means the embedded model.
            weights: Tensors in place of those of the model, as in `update_weights`. Then only the
                configuration and the tokenizer of the model are read.
            weight_version: Version of the weights.
            **options: The options of `LLM`.
        """
        config = EngineConfig.of(model, options)
        if config.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={config.data_parallel_size} is an option of LLM, AsyncLLM and "
                f"serve, and not of {type(self).__name__}. Use LLM, which has the same calls."
            )
        check_process(first_process())
        tree = None if weights is None else named_arrays("weights", weights)
        check_version(weight_version)
        progress = sys.stderr.isatty() if config.show_progress is None else config.show_progress
        loaded = load(config, progress=progress, weights=tree)
        folder, model_config, proposer = loaded.folder, loaded.model, loaded.proposer
        self.tokenizer, self.vocab_size = loaded.tokenizer, model_config.vocab_size
        self._show_progress = progress
        runner, self._matchers = loaded.runner, loaded.matchers
        self._processors = loaded.processors
        self._request_key = proposer.request_key if proposer else lambda prompt, seed: 0
        self.inputs = _inputs_of(loaded)
        flight = _flight_of(loaded, config, weight_version if tree else None)
        on_failure = flight and functools.partial(flight.save_failure, folder=config.flight_folder)
        self._histograms = RequestHistograms()
        observers = *loaded.observers, self._histograms
        parts = loaded.host_drafter, loaded.host_tier, observers
        scheduler = Scheduler(runner.shapes, loaded.limits, *parts)
        engine = Engine(scheduler, flight or runner, max_in_flight=config.max_in_flight)
        self.session, self._layouts = Session(engine, on_failure), loaded.layouts
        self._begin_versions(weight_version)
        runner.on_loss(self.session.report)
        self.shapes, self.limits = runner.shapes, loaded.limits
        self.model_name = str(model or folder.name)
        self._runner, self._flight = runner, flight
        self._added = dict[str, Sequence[Sample]]()  # unfinished requests of `add_request`, by id
        self._profiler_folder = config.profiler_folder
        self._method = loaded.speculation.method if loaded.speculation else None
        notice: Notice = "line" if config.show_progress is None else "none"
        if progress:
            notice = "bar"
        self._compiler = Compiler(
            runner,
            loaded.limits,
            in_turn=functools.partial(_in_usable_turn, self.session),
            guard=self.session.guarded,
            publish=scheduler.programs.add,
            on_run=scheduler.step_seconds.guess,
            notice=notice,
            in_background=config.background_compilation,
        )
        weakref.finalize(self, self._compiler.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model of `engine_args`.

        Args:
            engine_args: Options of the engine.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: as in the constructor.
        """
        return cls(**engine_args.options())

    def close(self) -> None:
        """Abort all requests and free the device memory. Later calls raise RuntimeError."""
        self._compiler.close()
        self.session.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: the model has no tokenizer.
        """
        return self.inputs.require_tokenizer("get_tokenizer()")

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the parameters of calls without any (option `generation_config`)."""
        return self.inputs.default_params.clone()

    def warm_up(self, feature_sets: Kind | Iterable[Kind] | None = None) -> None:
        """Compile all programs for some sampling features, and wait for them.

        Calling it is optional: the first request compiles programs that serve any request, and
        faster specialized ones are compiled in the background (`background_compilation`). Call it
        before measurements, or to have all compilation done before the first request.

        Args:
            feature_sets: The `SamplingParams` of a request or a word, or several of them. Words are
                "greedy", "sampled" (temperature), "top_k" (up to 128), "full" (any top-k, top-p)
                and "everything". None means all.

        Raises:
            ValueError: a word is unknown, or a value has another type.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        self._compiler.complete(LADDER if feature_sets is None else features_named(feature_sets))

    def get_ready(self) -> None:
        """Compile programs that serve any request, so that the first request does not wait.

        Without `background_compilation` these are all programs, as in `warm_up`.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        self._compiler.ensure(set(LADDER))

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """Check prompts, create their samples, and compile the programs they need.

        Nothing is queued.

        Args:
            prompts: Prompts as in `LLM.generate`.
            sampling_params: As in `LLM.generate`.
            request_ids: As in `LLM.generate`.
            priority: As in `LLM.generate`.

        Returns:
            The samples of each prompt.

        Raises:
            ValueError, RuntimeError: as in `LLM.generate`.
        """
        self.session.require_usable()
        groups = self.inputs.process(prompts, sampling_params, request_ids, priority)
        self.admit([sample for group in groups for sample in group])
        return groups

    def admit(self, samples: Sequence[Sample]) -> None:
        """Check samples against the engine's limits, and compile the programs they need.

        Sets `proposer_key`, `token_filter`, and `automaton` or `matcher` of their requests.

        Args:
            samples: Samples from `inputs`, or from a twin of it in another process.

        Raises:
            ValueError, RuntimeError: as in `LLM.generate`.
        """
        self.session.require_usable()
        self.session.gate.check_admits()
        for request in (sample.request for sample in samples):
            key = self._request_key(request.prompt, request.seed)
            request.proposer_key = integer("request_key", key, 0, INT32_MAX)
            self._processors.admit(request, self.vocab_size)
            if request.grammar is not None:
                request.automaton = self._matchers.automaton(request.grammar, request.output)
                if request.automaton is None:
                    request.matcher = self._matchers.matcher(request.grammar, request.output)
        self.session.check(samples)
        self._compiler.ensure({sample.request.features for sample in samples})

    # Requests, for callers with a loop of their own

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Check a prompt and queue a request, whose outputs `step` returns.

        Args:
            request_id: Id of the request, which no unfinished request of this method has.
            prompt: A prompt as in `LLM.generate`.
            params: Parameters; None means `get_default_sampling_params()`. `output_kind` selects
                what an output has.
            priority: As in `LLM.generate`.
            **others: Arguments of vLLM without a counterpart, such as `lora_request=None`.

        Returns:
            The id.

        Raises:
            TypeError: an argument is unknown.
            ValueError: the id is taken, or as in `LLM.generate`.
            RuntimeError: as in `LLM.generate`.
        """
        self.session.require_usable()
        check_call("add_request", others)
        samples = self.inputs.process_one(prompt, params, request_id, priority, call="add_request")
        self.admit(samples)
        for request in (sample.request for sample in samples):
            request.is_streamed = request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._queue([samples])
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the requests of `add_request` with new output.

        A dispatch is awaited up to `max_in_flight` steps later, so the first steps return nothing.
        While another thread has paused the engine, it waits a moment.

        Returns:
            One output per request, as `SamplingParams.output_kind` specifies.

        Raises:
            RuntimeError: as in `LLM.generate`.
            Exception: the step failed; all requests end with "error".
        """
        self.session.require_usable()
        session = self.session
        if session.can_step or (session.has_work and not session.gate.is_closed_here):
            session.step()
        outputs = list[RequestOutput]()
        for request_id, samples in list(self._added.items()):
            deltas = session.taken(samples)
            output = RequestOutput.due(samples, deltas) if deltas else None
            if output is not None:
                outputs.append(output)
            if all(sample.is_taken for sample in samples):
                self._added.pop(request_id, None)
        if not self._added:
            self.session.abort(())  # collects the steps in flight if no request is left
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has not yet returned the last output of a request."""
        return bool(self._added)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output `step` has not yet returned."""
        return len(self._added)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests of `add_request`; `step` returns nothing more of them.

        Args:
            request_ids: An id or several. Unknown ids and finished requests are ignored.

        Raises:
            RuntimeError: as in `LLM.abort`.
        """
        self.session.require_usable()
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if (samples := self._added.pop(name, None)) is not None:
                self.session.abort(samples)

    def _queue(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Queue the samples of new requests."""
        names = [samples[0].request_id for samples in groups]
        if taken_names := [name for name in names if name in self._added or names.count(name) > 1]:
            raise ValueError(
                f"A request must have an id that no other unfinished one has, got "
                f"{shown(taken_names[0])} again. Use another, or wait until it has ended."
            )
        for name, samples in zip(names, groups, strict=True):
            self.session.add(samples)
            self._added[name] = samples

    # Control

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes.

        Running requests continue, but their computed tokens will not be cached.

        Returns:
            True, as in vLLM.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        prefixes = self.session.scheduler.prefixes
        self.session.in_turn(lambda: self.session.guarded(prefixes.clear))
        return True

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the engine, which is its only worker.

        Args:
            method: One of `RPC_METHODS`.
            timeout: None; calls are made in this process.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            A list with the method's result.

        Raises:
            ValueError: the method is another one, or there is a timeout.
            RuntimeError: as in the method.
        """
        if not isinstance(method, str) or method not in RPC_METHODS or timeout is not None:
            raise ValueError(
                f"collective_rpc calls {', '.join(RPC_METHODS)}, without a timeout, got "
                f"{shown(method)} with timeout={shown(timeout)}: there are no worker processes, "
                "and their internals are vLLM's own. Call a method of the LLM."
            )
        return [getattr(self, method)(*args, **(kwargs or {}))]


def _flight_of(
    loaded: Loaded, config: EngineConfig, weight_version: str | None
) -> FlightRecorder | None:
    if config.flight_recorder == "off":
        return None
    runner, vocab_size = loaded.runner, loaded.model.vocab_size
    told = about(loaded.config, loaded.folder, vocab_size, weight_version)
    is_hashed = config.flight_recorder == "hashed"
    return FlightRecorder(runner, runner.shapes, told, hashed=is_hashed)


def _inputs_of(loaded: Loaded) -> InputProcessor:
    return InputProcessor(
        loaded.tokenizer,
        vocab_size=loaded.model.vocab_size,
        max_model_len=loaded.runner.shapes.max_model_len,
        eos_ids=loaded.model.eos_token_ids,
        seed=loaded.config.seed,
        default_params=loaded.default_params,
        finds_boundaries=loaded.limits.prefix_caching == "all",
        reasoning_parser=loaded.config.reasoning_parser,
        logprobs_mode=loaded.config.logprobs_mode,
        processor_params=loaded.processors.params,
        returns_routes=loaded.config.enable_return_routed_experts,
    )


def _in_usable_turn(session: Session, act: Callable[[], object]) -> object:
    def checked() -> object:
        session.require_usable()  # another thread may have closed the session
        session.gate.check_awake()
        return act()

    return session.in_turn(checked)

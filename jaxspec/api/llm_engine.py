"""`LLMEngine`: the loaded model, session and tokenizer of `LLM` and `AsyncLLM`."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.api.inputs import InputProcessor
from jaxspec.api.loading import load
from jaxspec.checks import integer
from jaxspec.engine.engine import Engine, StepTimes
from jaxspec.engine.metrics import Metric, metrics_of
from jaxspec.engine.session import Session
from jaxspec.flight.about import about
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.options.engine_options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.process import check_process, first_process
from jaxspec.requests.outputs import Sample
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.request import INT32_MAX
from jaxspec.requests.sampling_features import LADDER, features_named
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner.compiler import Compiler
from jaxspec.runner.memory import memory_map
from jaxspec.runner.warmup import Notice
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.text.tokenizer import Tokenizer

Kind = str | SamplingParams


class LLMEngine:
    """Loaded model with its session and tokenizer. Thread-safe.

    Compiles the programs that samples need; subclasses and `AsyncLLM` step the session.

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

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Load the model and allocate its state; programs are compiled when first needed.

        Args:
            model: A folder, a GGUF file or a hub id; None means the embedded model.
            **options: The options of `LLM`.
        """
        config = EngineConfig.of(model, options)
        check_process(first_process())
        progress = sys.stderr.isatty() if config.show_progress is None else config.show_progress
        loaded = load(config, progress=progress)
        folder, model_config, proposer = loaded.folder, loaded.model, loaded.proposer
        self.tokenizer, self.vocab_size = loaded.tokenizer, model_config.vocab_size
        self._show_progress = progress
        runner = loaded.runner
        self._request_key = proposer.request_key if proposer else lambda prompt, seed: 0
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=runner.shapes.max_model_len,
            eos_ids=model_config.eos_token_ids,
            seed=config.seed,
            default_params=loaded.default_params,
            finds_boundaries=loaded.limits.prefix_caching == "all",
        )
        flight, on_failure = None, None
        if config.flight_recorder != "off":
            flight = FlightRecorder(
                runner,
                runner.shapes,
                about(loaded.config, folder, self.vocab_size),
                hashed=config.flight_recorder == "hashed",
            )
            on_failure = functools.partial(flight.save_failure, folder=config.flight_folder)
        parts = loaded.host_drafter, loaded.host_tier, loaded.observers
        scheduler = Scheduler(runner.shapes, loaded.limits, *parts)
        engine = Engine(scheduler, flight or runner, max_in_flight=config.max_in_flight)
        self.session = Session(engine, on_failure)
        self.shapes, self.limits = runner.shapes, loaded.limits
        self.model_name = str(model or folder.name)
        self._runner, self._flight = runner, flight
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

        Sets the `proposer_key` of their requests.

        Args:
            samples: Samples from `inputs`, or from a twin of it in another process.

        Raises:
            ValueError, RuntimeError: as in `LLM.generate`.
        """
        self.session.require_usable()
        for request in (sample.request for sample in samples):
            key = self._request_key(request.prompt, request.seed)
            request.proposer_key = integer("request_key", key, 0, INT32_MAX)
        self.session.check(samples)
        self._compiler.ensure({sample.request.features for sample in samples})

    # Metrics and diagnostics

    def metrics(self) -> dict[str, Any]:
        """Return the engine's metrics since its start.

        Returns:
            A dict of step, token and preemption counts, host times in seconds, rates per second,
            `acceptance` by draft method, `shapes` of the programs, `compile_seconds` by program,
            `memory_bytes` by pool, and the `implementations` chosen for each op.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        engine = self.session.engine
        return {
            **engine.figures(),
            "acceptance": {self._method: vars(engine.acceptance).copy()} if self._method else {},
            "shapes": self.shapes.compiled(),
            "compile_seconds": dict(self._compiler.seconds),
            "memory_bytes": self._runner.memory(),
            "implementations": dispatch.implementations(),
        }

    def get_metrics(self) -> list[Metric]:
        """Return the metrics shared with vLLM, under vLLM's names.

        Returns:
            Counters, gauges and vectors, labelled with the model's name.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        return metrics_of(self.session.engine, self.model_name)

    def save_flight(self, path: str | Path) -> Path:
        """Write the recorded steps to a file for `python -m jaxspec replay`.

        Steps are recorded from the start, the last failure or the last `restart_flight`. A failed
        step saves its flight automatically.

        Args:
            path: File to write.

        Returns:
            The path, with `~` expanded.

        Raises:
            ValueError: the flight recorder is off, or had to drop its steps.
            OSError: the file can't be written.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        flight, path = self._require_flight(), Path(path).expanduser()
        self.session.in_turn(lambda: flight.save(path))
        return path

    def restart_flight(self) -> None:
        """Drop the recorded steps and record from a copy of the current device state.

        Raises:
            ValueError: the flight recorder is off or hashes token ids, or the state is too large.
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.in_turn(self._restart_flight_in_turn)

    def _restart_flight_in_turn(self) -> None:
        self.session.require_usable()
        self._require_flight().restart(lambda: self.session.guarded(self._runner.copy_state))

    def _require_flight(self) -> FlightRecorder:
        if self._flight is None:
            raise ValueError(
                "There is no flight to save with flight_recorder='off'. Use 'full' or 'hashed'."
            )
        return self._flight

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

    def memory_map(self) -> str:
        """Return the use of device memory as text, one line per use, the largest first.

        Raises:
            RuntimeError: the engine is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        return memory_map(self._runner.memory(), self.shapes)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[StepTimes]]:
        """Record when each step is planned, dispatched and run.

        Use it as `with llm.trace() as steps:`, and `jaxspec.viz.plot.timeline(steps)` after the
        block. A thread waits for the device meanwhile.

        Yields:
            The list that collected steps are appended to.

        Raises:
            RuntimeError: another trace is active, the engine is closed, or this is a forked child
                of its process.
        """
        self.session.require_usable()
        watching, steps = contextlib.ExitStack(), list[StepTimes]()
        try:
            self.session.in_turn(lambda: self._start_trace(watching, steps))
            yield steps
        finally:
            self.session.leave_note(lambda: self._end_trace(watching, steps))

    def _start_trace(self, watching: contextlib.ExitStack, steps: list[StepTimes]) -> None:
        if self.session.engine.trace is not None:
            raise RuntimeError("An LLM keeps one trace at a time: leave the other `with` first.")
        watching.enter_context(self._runner.watch())
        self.session.engine.trace = steps

    def _end_trace(self, watching: contextlib.ExitStack, steps: list[StepTimes]) -> None:
        if self.session.engine.trace is steps:
            self.session.engine.trace = None
        watching.close()


def _in_usable_turn(session: Session, act: Callable[[], object]) -> object:
    def checked() -> object:
        session.require_usable()  # another thread may have closed the session
        return act()

    return session.in_turn(checked)

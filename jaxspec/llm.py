"""Text in, text out; the only file that knows every part and joins them."""

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.beam_search import beam_search as _beam_search
from jaxspec.engine import Engine, StepTimes
from jaxspec.flight.about import about
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.inputs import InputProcessor, Prompt, params_of, prompts_of
from jaxspec.loading import load
from jaxspec.options import SIGNATURE, EngineConfig, listing
from jaxspec.outputs import RequestOutput, Sample, Stream
from jaxspec.pallas import dispatch
from jaxspec.process import check_process, first_process
from jaxspec.runner.memory import memory_map
from jaxspec.runner.warmup import warm_up
from jaxspec.sampler import SAMPLERS, Sampler
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.score import score as _score
from jaxspec.session import Session
from jaxspec.tokenizer import Tokenizer

Groups = list[list[Sample]]  # the samples of each prompt
_BAR: dict[str, Any] = {"desc": "generating", "leave": False, "mininterval": 0.25, "miniters": 0}


class LLM:
    """A model, its engine and its tokenizer; several threads may call it at once.

    `close` gives the device's memory back, as does the end of a `with` block.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        TypeError: there is no such option.
        ValueError: an option, the configuration or the weights break a rule, or do not fit.
        RuntimeError: this is a forked child of a process that made an LLM.
    """

    __signature__ = SIGNATURE

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Load the model and allocate its state; programs are compiled when first needed."""
        config = EngineConfig.of(model, options)
        check_process(first_process())
        progress = sys.stderr.isatty() if config.show_progress is None else config.show_progress
        loaded = load(config, progress=progress)
        folder, model_config, proposer = loaded.folder, loaded.model, loaded.proposer
        self._runner = loaded.runner
        self._show_progress = progress
        self._samplers: set[Sampler] = set()  # those that programs are compiled for
        self._compile_seconds: dict[str, float] = {}
        self._method = loaded.speculation.method if loaded.speculation else None
        self.tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        self.shapes = self._runner.shapes  # with the pages that fit
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=model_config.vocab_size,
            max_model_len=self.shapes.max_model_len,
            eos_ids=model_config.eos_token_ids,
            request_key=proposer.request_key if proposer else lambda prompt, seed: 0,
            seed=config.seed,
        )
        self._flight, on_failure = None, None
        if config.flight_recorder != "off":
            self._flight = FlightRecorder(
                self._runner,
                self.shapes,
                about(loaded.config, folder, model_config.vocab_size),
                hashed=config.flight_recorder == "hashed",
            )
            on_failure = functools.partial(self._flight.save_failure, folder=config.flight_folder)
        scheduler = Scheduler(self.shapes, config.max_step_ms, loaded.host_drafter)
        engine = Engine(scheduler, self._flight or self._runner, max_in_flight=config.max_in_flight)
        self.session = Session(engine, on_failure)  # for those who step it themselves

    def __enter__(self) -> "LLM":
        """The LLM itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End what runs with "abort" and give the device's memory back; later calls are refused."""
        self.session.close()

    def abort(self, request_id: str) -> None:
        """End every sample of the requests of this id that are queued, with "abort".

        Any thread may call it, while others wait in `generate` or read a stream. A request that has
        ended, or never was, is passed over.
        """
        self.session.require_usable()
        self.session.abort(str(request_id))

    def warm_up(self, samplers: Iterable[str] = tuple(SAMPLERS)) -> None:
        """Compile what requests of these kinds need: "greedy", "sampled" (temperature), "top_k" (up
        to 128) or "full" (any top-k, top-p). `generate` does it for what it is given.
        """
        self._compile([Sampler.named(word) for word in samplers])

    def _compile(self, samplers: Iterable[Sampler]) -> None:
        self.session.in_turn(lambda: self._compile_in_turn(samplers))

    def _compile_in_turn(self, samplers: Iterable[Sampler]) -> None:
        """Programs run on the engine's state once they are compiled."""
        self.session.require_usable()  # another thread may have closed it
        self._samplers.update(samplers)  # a step may have rows of any two that ever came
        self._compile_seconds |= warm_up(
            self._runner,
            self._samplers,
            progress=self._show_progress,
            guard=self.session.guarded,
            on_run=self.session.scheduler.step_seconds.guess,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, each a text or `{"prompt_token_ids": [...]}`; outputs in their order.

        `sampling_params`: one for all or one each; None is greedy, 128 tokens. `request_ids`: a
        name for each prompt, which `abort` takes; None: numbers.

        Raises:
            ValueError: a prompt or parameter breaks a rule. Nothing is queued then.
            RuntimeError: the LLM is closed, or this is a forked child of its process.
        """
        batch = prompts_of(prompts)
        groups = self._prepare(batch, params_of(sampling_params, len(batch)), request_ids)
        samples = [sample for group in groups for sample in group]
        is_silent = not self._show_progress
        with (
            tqdm(total=len(samples), unit="sample", disable=is_silent, **_BAR) as bar,
            contextlib.closing(self.session.run(samples)) as run,
        ):
            for left in run:
                if bar.update(bar.total - len(left) - bar.n):  # drawn, every 0.25 s at most
                    count = sum(sample.request.num_output for sample in samples)
                    speed = count / bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        return [
            RequestOutput.of(prompt if isinstance(prompt, str) else prompt.get("prompt"), group)
            for prompt, group in zip(batch, groups, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Stream:
        """The pieces of one completion as they come. The first `next` queues it.

        `with llm.stream(...) as pieces:` ends the request when the block is left early.

        Raises:
            ValueError: as in `generate`, and for `n` above 1.
            RuntimeError: as in `generate`.
        """
        params = params_of(sampling_params, 1)
        if params[0].n != 1:
            raise ValueError(f"stream gives one sample, got n={params[0].n}; use generate.")
        ids = None if request_id is None else [request_id]
        ((sample,),) = self._prepare([prompt], params, ids)
        return Stream(self.session.stream(sample), sample.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Complete a conversation, written out by the checkpoint's chat template.

        Raises:
            ValueError: no tokenizer or template, or one it refuses; and as in `generate`.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        prompt = self._inputs.chat(messages, template_options)
        return self.generate(prompt, sampling_params)[0]

    beam_search, score = _beam_search, _score

    def metrics(self) -> dict[str, Any]:
        """Counts, acceptance by method, seconds, speeds, shapes, bytes by pool, what each op runs.

        Raises:
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        engine = self.session.engine
        return {
            **engine.figures(),
            "acceptance": {self._method: vars(engine.draft_counts).copy()} if self._method else {},
            "shapes": self.shapes.compiled(),
            "compile_seconds": dict(self._compile_seconds),
            "memory_bytes": self._runner.memory(),
            "implementations": dispatch.implementations(),
        }

    def save_flight(self, path: str | Path) -> Path:
        """Write the steps since the start to `path`, for `python -m jaxspec replay`.

        Since the last `restart_flight` or failure, if there was one. When a step fails, this
        happens by itself.

        Raises:
            ValueError: the flight recorder is off, or had to drop its steps.
            OSError: the file can't be written.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        flight, path = self._require_flight(), Path(path).expanduser()
        self.session.in_turn(lambda: flight.save(path))
        return path

    def restart_flight(self) -> None:
        """Record from here on: copy the device's state to the host and forget the steps before.

        Raises:
            ValueError: the flight recorder is off, or leaves token ids out.
            RuntimeError: as in `generate`.
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

    def memory_map(self) -> str:
        """What holds the device's memory, for people: a line each, the biggest first.

        Raises:
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        return memory_map(self._runner.memory(), self.shapes)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[StepTimes]]:
        """`with llm.trace() as steps:` lists when each step was planned, dispatched and run.

        For `jaxspec.plot.timeline`, after the block. Costs a thread that waits for the device.
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

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None = None,
    ) -> Groups:
        """Everything that may refuse or take long, before anything is queued."""
        self.session.require_usable()
        groups = self._inputs.process(prompts, params, request_ids)
        self.session.check(sample for group in groups for sample in group)
        self._compile({sample.request.sampler for group in groups for sample in group})
        return groups


LLM.__doc__ = f"{LLM.__doc__}\n    Args:\n{listing()}\n"

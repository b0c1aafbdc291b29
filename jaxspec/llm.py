"""Text in, text out; the only file that knows every part and joins them."""

import contextlib
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from jaxspec import progress_bar, travelling
from jaxspec.beam_search import beam_search as _beam_search
from jaxspec.checks import INT64_MAX, integer
from jaxspec.conversations import Messages, TemplateOptions
from jaxspec.diagnostics import Diagnostics
from jaxspec.engine import Engine
from jaxspec.flight.about import about
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.inputs import InputProcessor, params_of
from jaxspec.loading import load
from jaxspec.options import SIGNATURE, EngineConfig, listing
from jaxspec.outputs import RequestOutput, Sample, Stream
from jaxspec.process import check_process, first_process
from jaxspec.prompts import Prompt, check_is_one, parts_of, prompts_of
from jaxspec.runner.warmup import Notice, warm_up
from jaxspec.sampler import SAMPLERS, Sampler, samplers_named, to_compile
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.score import score as _score
from jaxspec.session import Session
from jaxspec.tokenizer import Tokenizer

Groups = list[list[Sample]]  # the samples of each prompt
Params = SamplingParams | Sequence[SamplingParams] | None
Kind = str | SamplingParams


class LLM(Diagnostics):
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
        self.tokenizer = loaded.tokenizer
        self._show_progress = progress
        self._notice: Notice = "line" if config.show_progress is None else "none"
        self._samplers: set[Sampler] = set()  # those that programs are compiled for
        self._default_params, runner = loaded.default_params, loaded.runner
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=model_config.vocab_size,
            max_model_len=runner.shapes.max_model_len,
            eos_ids=model_config.eos_token_ids,
            request_key=proposer.request_key if proposer else lambda prompt, seed: 0,
            seed=config.seed,
            finds_boundaries=runner.shapes.prefix_caching == "all",
        )
        flight, on_failure = None, None
        if config.flight_recorder != "off":
            flight = FlightRecorder(
                runner,
                runner.shapes,
                about(loaded.config, folder, model_config.vocab_size),
                hashed=config.flight_recorder == "hashed",
            )
            on_failure = functools.partial(flight.save_failure, folder=config.flight_folder)
        parts = loaded.host_drafter, loaded.host_tier
        scheduler = Scheduler(runner.shapes, config.max_step_ms, *parts)
        engine = Engine(scheduler, flight or runner, max_in_flight=config.max_in_flight)
        super().__init__(
            Session(engine, on_failure),
            runner,
            flight=flight,
            method=loaded.speculation.method if loaded.speculation else None,
            model_name=str(model or folder.name),
        )

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

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: there is none.
        """
        return self._inputs.require_tokenizer("get_tokenizer()")

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what a call without parameters uses, by the option `generation_config`."""
        return self._default_params.clone()

    def warm_up(self, samplers: Kind | Iterable[Kind] | None = None) -> None:
        """Compile what these kinds of requests need; None: all words, and calls without parameters.

        A kind is the `SamplingParams` of a request, or a word: "greedy", "sampled" (temperature),
        "top_k" (up to 128) or "full" (any top-k, top-p). `generate` does it for what it is given.

        Raises:
            ValueError: there is no such kind.
            RuntimeError: as in `generate`.
        """
        kinds = [*SAMPLERS, self._default_params] if samplers is None else samplers
        self._compile(samplers_named(kinds))

    def _compile(self, samplers: Iterable[Sampler]) -> None:
        self.session.in_turn(lambda: self._compile_in_turn(samplers))

    def _compile_in_turn(self, samplers: Iterable[Sampler]) -> None:
        """Programs run on the engine's state once they are compiled."""
        self.session.require_usable()  # another thread may have closed it
        wanted = self._samplers | set(samplers)  # a step may have rows of any two that ever came
        if wanted == self._samplers:
            return
        self._compile_seconds |= warm_up(
            self._runner,
            wanted,
            notice="bar" if self._show_progress else self._notice,
            guard=self.session.guarded,
            on_run=self.session.scheduler.step_seconds.guess,
        )
        self._samplers, self.session.scheduler.samplers = wanted, tuple(to_compile(wanted))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: progress_bar.Bar = None,
        priority: int | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs in their order.

        A prompt is a text, a list of token ids, or a dict: `TextPrompt` or `TokensPrompt`.

        `sampling_params`: one for all or one each; None: `get_default_sampling_params()`.
        `use_tqdm`: whether a bar is drawn, or a tqdm class to draw it; None: as `show_progress`.
        `priority`: one for all or one each; of the requests that wait, those with lower numbers
        enter first, and among equals those that came first; None: 0.
        `request_ids`: a name for each prompt, which `abort` takes; None: numbers.

        Raises:
            ValueError: a prompt or parameter breaks a rule. Nothing is queued then.
            RuntimeError: the LLM is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        progress_bar.check(use_tqdm)
        batch = prompts_of(prompts)
        params = params_of(sampling_params, len(batch), self._default_params)
        groups = self._prepare(batch, params, request_ids, priority)
        samples = [sample for group in groups for sample in group]
        with (
            progress_bar.open_bar(use_tqdm, len(samples), is_shown=self._show_progress) as bar,
            contextlib.closing(self.session.run(samples)) as run,
        ):
            for left in run:
                progress_bar.move(bar, samples, len(left))
        return [
            RequestOutput.of(parts_of(prompt).text, group)
            for prompt, group in zip(batch, groups, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Stream:
        """The pieces of a prompt's samples as they come. The first `next` queues it.

        A piece names its sample in `index`; `SamplingParams.output_kind` says what it holds.
        `with llm.stream(...) as pieces:` ends the request when the block is left early.

        Raises:
            ValueError: as in `generate`, and for several prompts.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        batch, ids = prompts_of(prompt), None if request_id is None else [request_id]
        check_is_one("prompt", batch)
        params = params_of(sampling_params, 1, self._default_params)
        (samples,) = self._prepare(batch, params, ids, integer("priority", priority, -INT64_MAX))
        return Stream(self.session.stream(*samples), samples[0].request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: progress_bar.Bar = None,
        priority: int | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Complete one conversation or several, written out by the checkpoint's chat template.

        A message is `{"role": ..., "content": ...}`. A content is a text or a list of parts, each
        `{"type": "text", "text": ...}`.

        `template`, all by name: `chat_template`, the text of another template or the name of one
        that the checkpoint has; `chat_template_kwargs`, a dict of the template's own switches, such
        as `{"enable_thinking": False}`; `tools`, a list of tools in JSON's values;
        `add_generation_prompt` (True), whether the text ends where the assistant begins to speak;
        `continue_final_message` (False), whether it ends with the last message, for which
        `add_generation_prompt` must be False. The others are as in `generate`.

        Raises:
            TypeError: there is no such argument.
            ValueError: no tokenizer or template, or one it refuses; and as in `generate`.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        prompts = self._inputs.chats(messages, template)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            request_ids=request_ids,
        )

    beam_search, score = _beam_search, _score
    export_request, prefill = travelling.export_request, travelling.prefill
    import_request = travelling.import_request

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Stream:
        """The pieces of a conversation's next message as they come: `stream` for a `chat`.

        Raises:
            TypeError, ValueError, RuntimeError: as in `chat` and `stream`.
        """
        self.session.require_usable()
        prompts = self._inputs.chats(messages, template)
        check_is_one("conversation", prompts)
        return self.stream(prompts[0], sampling_params, priority=priority, request_id=request_id)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Groups:
        """Everything that may refuse or take long, before anything is queued."""
        self.session.require_usable()
        groups = self._inputs.process(prompts, params, request_ids, priority)
        self.session.check(sample for group in groups for sample in group)
        self._compile({sample.request.sampler for group in groups for sample in group})
        return groups


LLM.__doc__ = f"{LLM.__doc__}\n    Args:\n{listing()}\n"

"""LLMEngine: what LLM and AsyncLLM share; it knows every part below them and joins them."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.conversations import Messages, TemplateOptions
from jaxspec.diagnostics import Diagnostics
from jaxspec.engine import Engine
from jaxspec.flight.about import about
from jaxspec.flight.recorder import FlightRecorder
from jaxspec.inputs import InputProcessor
from jaxspec.loading import load
from jaxspec.options import EngineConfig
from jaxspec.outputs import Sample
from jaxspec.per_prompt import for_one
from jaxspec.process import check_process, first_process
from jaxspec.prompts import Prompt, TokensPrompt, only_prompt
from jaxspec.runner.compiler import Compiler
from jaxspec.runner.warmup import Notice
from jaxspec.sampler import LADDER, Sampler, samplers_named
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.session import Session
from jaxspec.tokenizer import Tokenizer

Groups = list[list[Sample]]  # the samples of each prompt
Kind = str | SamplingParams


class LLMEngine(Diagnostics):
    """A loaded model, its session and its tokenizer; several threads may call it at once.

    It makes samples of prompts and compiles what they need. Who steps them is another's choice.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        TypeError: there is no such option.
        ValueError: an option, the configuration or the weights break a rule, or do not fit.
        RuntimeError: this is a forked child of a process that made an LLM.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Load the model and allocate its state; programs are compiled when first needed."""
        config = EngineConfig.of(model, options)
        check_process(first_process())
        progress = sys.stderr.isatty() if config.show_progress is None else config.show_progress
        loaded = load(config, progress=progress)
        folder, model_config, proposer = loaded.folder, loaded.model, loaded.proposer
        self.tokenizer, self.vocab_size = loaded.tokenizer, model_config.vocab_size
        self._show_progress = progress
        self._default_params = loaded.default_params
        runner = loaded.runner
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.vocab_size,
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
                about(loaded.config, folder, self.vocab_size),
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
        notice: Notice = "line" if config.show_progress is None else "none"
        if progress:
            notice = "bar"
        self._compiler = Compiler(
            runner,
            in_turn=functools.partial(_in_usable_turn, self.session),
            guard=self.session.guarded,
            publish=scheduler.programs.add,
            on_run=scheduler.step_seconds.guess,
            notice=notice,
            in_background=config.background_compilation,
        )
        self._compile_seconds = self._compiler.seconds
        weakref.finalize(self, self._compiler.close)

    def close(self) -> None:
        """End what runs with "abort" and give the device's memory back; later calls are refused."""
        self._compiler.close()
        self.session.close()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError: there is none.
        """
        return self._inputs.require_tokenizer("get_tokenizer()")

    def twin_inputs(self, number: int) -> Callable[[], InputProcessor]:
        """As `InputProcessor.twin` of the one here."""
        return self._inputs.twin(number)

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what a call without parameters uses, by the option `generation_config`."""
        return self._default_params.clone()

    def warm_up(self, samplers: Kind | Iterable[Kind] | None = None) -> None:
        """Compile every program of these kinds of requests, and wait for them.

        No request needs the call: the first one compiles what serves any request, and the other
        programs, which make steps cheaper, are compiled in the background
        (`background_compilation`). It is for measurements, and for those who would rather wait.

        Args:
            samplers: Kinds of requests, each the `SamplingParams` of one or a word: "greedy",
                "sampled" (temperature), "top_k" (up to 128), "full" (any top-k, top-p) or
                "everything". None means all.

        Raises:
            ValueError: There is no such kind.
            RuntimeError: As in `generate`.
        """
        self.session.require_usable()
        self._compiler.complete(LADDER if samplers is None else samplers_named(samplers))

    def get_ready(self) -> None:
        """Compile what serves any request, so that the first one need not wait.

        Without `background_compilation` these are all programs, as in `warm_up`.

        Raises:
            RuntimeError: As in `generate`.
        """
        self.session.require_usable()
        self._compile(set(LADDER))

    def _compile(self, samplers: set[Sampler]) -> None:
        self._compiler.ensure(samplers)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Groups:
        """Everything that may refuse or take long, before anything is queued."""
        self.session.require_usable()
        groups = self._inputs.process(prompts, params, request_ids, priority)
        self._admit([sample for group in groups for sample in group])
        return groups

    def admit(self, samples: Sequence[Sample]) -> None:
        """Check samples that were made elsewhere, and compile what they need.

        Raises:
            ValueError, RuntimeError: as in `LLM.generate`.
        """
        self.session.require_usable()
        for request in (sample.request for sample in samples):
            request.proposer_key = self._inputs.proposer_key(request.prompt, request.seed)
        self._admit(samples)

    def _admit(self, samples: Sequence[Sample]) -> None:
        self.session.check(samples)
        self._compile({sample.request.sampler for sample in samples})

    def one_prompt(self, prompt: Any, call: str = "stream") -> Any:
        """The prompt of a `call` that takes one alone; it may come as a list of one.

        Raises:
            ValueError: these are several prompts, or none.
            RuntimeError: as in `LLM.generate`.
        """
        self.session.require_usable()
        return only_prompt(prompt, call)

    def prepare_one(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> list[Sample]:
        """`prepare` for one prompt, as `one_prompt` gives it.

        Raises:
            ValueError, RuntimeError: as in `LLM.generate`.
        """
        given = for_one(sampling_params, self._default_params, request_id, priority)
        (samples,) = self.prepare([prompt], *given)
        return samples

    def chat_prompt(self, messages: Messages, template: TemplateOptions) -> TokensPrompt:
        """The prompt of one conversation, with its text.

        Raises:
            TypeError, ValueError, RuntimeError: as in `LLM.chat`, and for several conversations.
        """
        self.session.require_usable()
        return self._inputs.chat(messages, template)


def _in_usable_turn(session: Session, act: Callable[[], object]) -> object:
    def checked() -> object:
        session.require_usable()  # another thread may have closed it
        return act()

    return session.in_turn(checked)

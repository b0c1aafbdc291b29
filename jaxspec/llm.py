"""Text in, text out; the only file that knows every part and joins them."""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.cache import kv_dtype_of
from jaxspec.config import StateConfig
from jaxspec.engine import Engine, StepTimes
from jaxspec.inputs import InputProcessor, Prompt, params_of, prompts_of
from jaxspec.models import dtype_of, load_model, resolve_folder
from jaxspec.options import SIGNATURE, EngineConfig, listing
from jaxspec.outputs import RequestOutput, Sample, TextDelta
from jaxspec.pallas import dispatch
from jaxspec.proposers import make_proposer
from jaxspec.runner.memory import MemoryBudget, memory_map
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.programs.compilation_cache import enable_compilation_cache
from jaxspec.runner.warmup import warm_up
from jaxspec.sampler import SAMPLERS, Sampler
from jaxspec.sampling import make_verifier
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.session import Session
from jaxspec.speculation import SpeculativeConfig
from jaxspec.tokenizer import Tokenizer

EMBEDDED_MODEL = Path(__file__).parent / "embedded"

Groups = list[list[Sample]]  # the samples of each prompt
_BAR: dict[str, Any] = {"desc": "generating", "leave": False, "mininterval": 0.25, "miniters": 0}


class LLM:
    """A model, its engine and its tokenizer; several threads may call it at once.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        TypeError: there is no such option.
        ValueError: an option, the configuration or the weights break a rule, or do not fit.
    """

    __signature__ = SIGNATURE

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Load the model and allocate its state; programs are compiled when first needed."""
        config = EngineConfig.of(model, options)
        enable_compilation_cache(config.compilation_cache)
        progress = sys.stderr.isatty() if config.show_progress is None else config.show_progress
        is_dummy = config.load_format == "dummy"
        folder = EMBEDDED_MODEL
        if config.model is not None:
            folder = resolve_folder(config.model, progress, weights=not is_dummy)
        dtype = dtype_of(config.dtype)
        # Taken before anything is loaded: the budget is what other engines leave.
        budget = MemoryBudget.of(config.gpu_memory_utilization, config.num_pages)
        loaded = load_model(folder, dtype, load_format=config.load_format, progress=progress)
        speculation = SpeculativeConfig.resolve(config.speculative_config, loaded.has_draft_head)
        proposer = make_proposer(speculation, loaded.vocab_size) if speculation else None
        self._show_progress = progress
        self._samplers: set[Sampler] = set()  # those that programs are compiled for
        self._compile_seconds: dict[str, float] = {}
        self.tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        shapes = config.step_shapes(
            max_positions=loaded.max_position_embeddings,
            num_drafts=speculation.num_speculative_tokens if speculation else 0,
        )
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=shapes.max_model_len,
            eos_ids=loaded.eos_token_ids,
            request_key=proposer.request_key if proposer else lambda prompt, seed: 0,
            seed=config.seed,
        )
        self._runner = ModelRunner(
            loaded,
            shapes,
            proposer,
            dtype=dtype,
            verifier=make_verifier(speculation),
            states=StateConfig.resolve(
                config.state_policy,
                config.state_dtype,
                has_kernels=dispatch.kernels_here()[1] is None,
            ),
            kv_dtype=kv_dtype_of(config.kv_dtype, dtype),
            budget=budget,
        )
        self.shapes = self._runner.shapes  # with the pages that fit
        engine = Engine(Scheduler(self.shapes), self._runner, max_in_flight=config.max_in_flight)
        self.session = Session(engine)  # for those who step it themselves

    def warm_up(self, samplers: Iterable[str] = tuple(SAMPLERS)) -> None:
        """Compile what requests of these kinds need: "greedy", "sampled" (temperature) or "full"
        (top-k, top-p). `generate` does it for what it is given; after it nothing compiles.
        """
        self._compile(map(Sampler.named, samplers))

    def _compile(self, samplers: Iterable[Sampler]) -> None:
        with self.session.turn():  # programs run on the engine's state once they are compiled
            self._samplers.update(samplers)  # a step may have rows of any two that ever came
            seconds = warm_up(self._runner, self._samplers, progress=self._show_progress)
            self._compile_seconds |= seconds

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, each a text or `{"prompt_token_ids": [...]}`; outputs in their order.

        `sampling_params`: one for all or one each; None is greedy, 128 tokens.

        Raises:
            ValueError: a prompt or parameter breaks a rule. Nothing is queued then.
        """
        batch = prompts_of(prompts)
        groups = self._prepare(batch, params_of(sampling_params, len(batch)))
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
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else prompt.get("prompt"),
                prompt_token_ids=list(group[0].request.prompt),
                outputs=[sample.output() for sample in group],
            )
            for prompt, group in zip(batch, groups, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """The pieces of one completion as they come. The first `next` queues it.

        Leaving the loop early aborts the request.

        Raises:
            ValueError: as in `generate`, and for `n` above 1.
        """
        params = params_of(sampling_params, 1)
        if params[0].n != 1:
            raise ValueError(f"stream gives one sample, got n={params[0].n}; use generate.")
        ((sample,),) = self._prepare([prompt], params)
        return self.session.stream(sample)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Complete a conversation, written out by the checkpoint's chat template.

        Raises:
            ValueError: no tokenizer or template, or one it refuses; and as in `generate`.
        """
        prompt = self._inputs.chat(messages, template_options)
        return self.generate(prompt, sampling_params)[0]

    def metrics(self) -> dict[str, Any]:
        """Counts, seconds (of the host, of compiling), shapes, bytes by pool, what each op runs."""
        engine = self.session.engine
        return {
            **vars(engine.metrics),
            "num_preemptions": engine.scheduler.num_preemptions,
            "max_in_flight": engine.max_in_flight,
            "shapes": self.shapes.compiled(),
            "compile_seconds": dict(self._compile_seconds),
            "memory_bytes": self._runner.memory(),
            "implementations": dispatch.implementations(),
        }

    def memory_map(self) -> str:
        """What holds the device's memory, for people: a line each, the biggest first."""
        return memory_map(self._runner.memory(), self.shapes)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[StepTimes]]:
        """`with llm.trace() as steps:` lists when each step was planned, dispatched and run.

        For `jaxspec.plot.timeline`, after the block. Costs a thread that waits for the device.
        """
        engine = self.session.engine
        with contextlib.ExitStack() as watching:
            with self.session.turn():
                if engine.trace is not None:
                    raise RuntimeError(
                        "An LLM keeps one trace at a time: leave the other `with` first."
                    )
                watching.enter_context(self._runner.watch())
                engine.trace = steps = []
            try:
                yield steps
            finally:
                with self.session.turn():
                    engine.trace = None
                    watching.close()

    def _prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Groups:
        """Everything that may refuse or take long, before anything is queued."""
        groups = self._inputs.process(prompts, params)
        self.session.check(sample for group in groups for sample in group)
        self._compile(param.sampler for param in params)
        return groups


LLM.__doc__ = f"{LLM.__doc__}\n    Args:\n{listing()}\n"


_KEPT: dict[EngineConfig, LLM] = {}  # what `generate` keeps, by its options
_KEPT_LOCK = threading.Lock()  # one thread at a time loads or drops one


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | Path | None = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Any,
) -> RequestOutput | list[RequestOutput]:
    """Complete one prompt or several with the embedded model, or with `model`.

    One `RequestOutput` for one prompt, a list for a list. `options` are those of `LLM`; the LLM is
    kept for the next call with the same options.
    """
    is_single = isinstance(prompts, str | Mapping)
    batch = prompts_of(prompts)
    num_samples = sum(param.n for param in params_of(sampling_params, len(batch)))
    rows = options.get("max_num_seqs") or (1 if num_samples < 2 else 8)
    key = EngineConfig.of(model, options)
    with _KEPT_LOCK:
        if key not in _KEPT or _KEPT[key].shapes.max_num_seqs < rows:
            _KEPT.clear()  # one model at a time: the old one's memory goes first
            _KEPT[key] = LLM(model, **{"max_num_seqs": rows, **options})
        llm = _KEPT[key]
    outputs = llm.generate(batch, sampling_params)
    return outputs[0] if is_single else outputs

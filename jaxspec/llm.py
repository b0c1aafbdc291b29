"""Text in, text out; the only file that knows every part and joins them."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from jaxspec.cache import kv_dtype_of
from jaxspec.config import Buckets, StateConfig
from jaxspec.engine import Engine, StepTimes
from jaxspec.inputs import Intake, Prompt, params_of
from jaxspec.models import dtype_of, load_model, resolve_folder
from jaxspec.outputs import Delta, RequestOutput, Sample
from jaxspec.pallas import dispatch
from jaxspec.proposers import make_proposer
from jaxspec.request import Finish, Request
from jaxspec.runner.memory import MemoryBudget, memory_map
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.programs.compilation_cache import enable_compilation_cache
from jaxspec.runner.warmup import warm_up
from jaxspec.sampler import SAMPLERS, Sampler
from jaxspec.sampling import make_verifier
from jaxspec.sampling_params import SamplingParams
from jaxspec.scheduler.scheduled_step import Progress
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.speculation import SpeculativeConfig
from jaxspec.tokenizer import Tokenizer

EMBEDDED_MODEL = Path(__file__).parent / "embedded"

Groups = list[list[Sample]]  # of each prompt its samples
_BAR: dict[str, Any] = {"desc": "generating", "leave": False, "mininterval": 0.25, "miniters": 0}


class LLM:
    """A model, its engine and its tokenizer.

    Args:
        model: a folder with `config.json` and safetensors, a hub id, or None: the embedded model.
        speculative_config: a `SpeculativeConfig` or a dict of its fields; "auto": MTP with 3
            drafts if the checkpoint has the head; None: plain decoding.
        load_format: "auto"; "dummy": random weights, for which `config.json` is enough.
        dtype: "float32", "bfloat16" or "auto" (bfloat16 on a GPU, float32 elsewhere).
        state_policy, state_dtype: as in `StateConfig`; "auto": replay where kernels run.
        kv_dtype: of cached keys and values, "bfloat16" or "float8_e4m3fn"; None: the model's.
        max_num_seqs: samples that run at once.
        max_model_len: tokens of a sample, prompt and output; at most what the model was made for.
        max_in_flight: dispatches that may be uncollected; 0 is the synchronous engine.
        steps_per_dispatch: decode steps that the host hands over at once while no prompt waits.
        page_size: tokens of a KV page.
        num_pages: pages of the pool; None: as `max_num_seqs` of `max_model_len` need, if they fit.
        gpu_memory_utilization: share of a GPU's memory that weights and caches may take, in (0, 1],
            of what JAX may: three quarters, or as XLA_PYTHON_CLIENT_MEM_FRACTION says.
        max_num_batched_tokens: verified and prefilled tokens of a step together.
        long_prefill_token_threshold: prompt tokens of one request in a step; None: no such limit.
        max_prefill_seqs: prompts that one step may advance.
        decode_buckets, prefill_buckets: sizes that get compiled, ascending.
        seed: of requests that bring no seed of their own.
        compilation_cache: folder of compiled programs; None: the user's cache folder.
        show_progress: progress bars; None: if standard error is a terminal.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        ValueError: an option, the configuration or the weights break a rule, or do not fit.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculative_config: SpeculativeConfig | dict[str, Any] | Literal["auto"] | None = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        dtype: str = "auto",
        state_policy: Literal["auto", "snapshot", "replay"] = "auto",
        state_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
        kv_dtype: Literal["bfloat16", "float8_e4m3fn"] | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_in_flight: int = 2,
        steps_per_dispatch: int = 1,
        page_size: int = 16,
        num_pages: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_batched_tokens: int | None = None,
        long_prefill_token_threshold: int | None = None,
        max_prefill_seqs: int = 4,
        decode_buckets: Sequence[int] | None = None,
        prefill_buckets: Sequence[int] | None = None,
        seed: int = 0,
        compilation_cache: str | Path | None = None,
        show_progress: bool | None = None,
    ):
        """Load the model and allocate its state; programs are compiled when first needed."""
        enable_compilation_cache(compilation_cache)
        progress = sys.stderr.isatty() if show_progress is None else show_progress
        self._show_progress, folder = progress, EMBEDDED_MODEL
        if model is not None:
            folder = resolve_folder(model, progress, weights=load_format != "dummy")
        array_type, kernels = dtype_of(dtype), dispatch.kernels_here()[1] is None
        states = StateConfig.resolve(state_policy, state_dtype, has_kernels=kernels)
        kv_type = kv_dtype_of(kv_dtype, array_type)  # before anything is loaded
        budget = MemoryBudget.of(gpu_memory_utilization, num_pages)
        loaded = load_model(folder, array_type, load_format=load_format, progress=progress)
        self.tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        config = SpeculativeConfig.resolve(speculative_config, loaded.has_draft_head)
        buckets = Buckets.of(
            max_num_seqs=max_num_seqs,
            max_model_len=_model_len(max_model_len, loaded.max_position_embeddings),
            page_size=page_size,
            num_pages=num_pages,
            num_drafts=config.num_speculative_tokens if config else 0,
            decode_rows=decode_buckets,
            prefill_tokens=prefill_buckets,
            max_prefill_seqs=max_prefill_seqs,
            steps_per_dispatch=steps_per_dispatch,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        proposer = make_proposer(config, loaded.vocab_size) if config else None
        self._runner = ModelRunner(
            loaded,
            buckets,
            proposer,
            dtype=array_type,
            verifier=make_verifier(config),
            states=states,
            kv_dtype=kv_type,
            budget=budget,
        )
        self.buckets = self._runner.buckets  # with the pages that fit
        self._scheduler = Scheduler(self.buckets)
        self._engine = Engine(self._scheduler, self._runner, max_in_flight=max_in_flight)
        self._samples: dict[Request, Sample] = {}
        self._compile_seconds: dict[str, float] = {}
        self._intake = Intake(
            self.tokenizer,
            vocab_size=loaded.vocab_size,
            eos_ids=loaded.eos_token_ids,
            request_key=proposer.request_key if proposer else lambda prompt, seed: 0,
            seed=seed,
        )

    def warm_up(self, samplers: Iterable[str] = tuple(SAMPLERS)) -> None:
        """Compile what requests of these kinds need: "greedy", "sampled" (temperature) or "full"
        (top-k, top-p). `generate` does it for what it is given; after it nothing compiles."""
        self._compile(map(Sampler.named, samplers))

    def _compile(self, samplers: Iterable[Sampler]) -> None:
        needed = {*samplers, *(r.sampler for r in self._samples)}  # a step may have rows of both
        self._compile_seconds |= warm_up(self._runner, needed, progress=self._show_progress)

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
        batch = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        groups = self._prepare(batch, params_of(sampling_params, len(batch)))
        left = {sample.request for group in groups for sample in group}
        with tqdm(total=len(left), unit="sample", disable=not self._show_progress, **_BAR) as bar:
            try:
                self._submit(groups)
                while left:
                    left -= {s.request for s in self._step() if s.request.finish}
                    if bar.update(bar.total - len(left) - bar.n):  # drawn, every 0.25 s at most
                        count = sum(len(sample.token_ids) for group in groups for sample in group)
                        speed = count / bar.format_dict["elapsed"]
                        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
            finally:
                self._forget(groups)
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
    ) -> Iterator[Delta]:
        """The pieces of one completion as they come, from the first `next` on.

        Leaving the loop early aborts the request.

        Raises:
            ValueError: as in `generate`, and for `n` above 1.
        """
        params = params_of(sampling_params, 1)
        if params[0].n != 1:
            raise ValueError(f"stream gives one sample, got n={params[0].n}; use generate.")
        groups = self._prepare([prompt], params)
        return self._deltas(groups)

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
        ids = self._intake.require_tokenizer("chats").chat(list(messages), **template_options)
        return self.generate({"prompt_token_ids": ids}, sampling_params)[0]

    def metrics(self) -> dict[str, Any]:
        """Counts, seconds (of the host, of compiling), shapes, bytes by pool, what each op runs."""
        return {
            **vars(self._engine.metrics),
            "num_preemptions": self._scheduler.num_preemptions,
            "max_in_flight": self._engine.max_in_flight,
            "shapes": self.buckets.shapes(),
            "compile_seconds": dict(self._compile_seconds),
            "memory_bytes": self._runner.memory(),
            "implementations": dispatch.implementations(),
        }

    def memory_map(self) -> str:
        """What holds the device's memory, for people: a line each, the biggest first."""
        return memory_map(self._runner.memory(), self.buckets)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[StepTimes]]:
        """`with llm.trace() as steps:` lists when each step was planned, dispatched and run.

        For `jaxspec.plot.timeline`, after the block. Costs a thread that waits for the device.
        """
        if self._engine.trace is not None:
            raise RuntimeError("An LLM keeps one trace at a time: leave the other `with` first.")
        with self._runner.watch():
            self._engine.trace = steps = []
            try:
                yield steps
            finally:
                self._engine.trace = None

    def _prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Groups:
        """Everything that may refuse or take long, before anything is queued."""
        groups = self._intake.make(prompts, params)
        self._scheduler.check(sample.request for group in groups for sample in group)
        self._compile(param.sampler for param in params)
        return groups

    def _submit(self, groups: Groups) -> None:
        samples = [sample for group in groups for sample in group]
        self._samples.update((sample.request, sample) for sample in samples)
        self._scheduler.add(sample.request for sample in samples)

    # The loop.

    def _step(self) -> list[Sample]:
        """One turn of the engine; the samples that got something."""
        try:
            return [self._record(progress) for progress in self._engine.step()]
        except BaseException:
            self._give_up()
            raise

    def _record(self, progress: Progress) -> Sample:
        sample = self._samples[progress.request]
        sample.push(progress.tokens)
        if sample.finish and not progress.request.finish:
            self._scheduler.end(progress.request, Finish.STOP)
        return sample

    def _give_up(self) -> None:
        """After a failed or interrupted step nobody knows what the device holds: start afresh."""
        for sample in self._samples.values():
            self._scheduler.end(sample.request, Finish.ERROR)
        self._engine.forget()
        self._runner.reset()

    def _deltas(self, groups: Groups) -> Iterator[Delta]:
        sample, done = groups[0][0], False
        seen_ids, seen_text = 0, 0
        try:
            self._submit(groups)
            while not done:
                if len(sample.token_ids) == seen_ids and not sample.finish:
                    self._step()
                # Another caller's loop may have moved this sample on, or ended it.
                done = bool(sample.finish)
                tokens, text = sample.token_ids[seen_ids:], sample.text[seen_text:]
                seen_ids, seen_text = len(sample.token_ids), len(sample.text)
                if tokens or done:
                    metrics = sample.request.metrics if done else None
                    yield Delta(text, tokens, sample.finish.reason, metrics)
        finally:
            self._forget(groups)

    def _forget(self, groups: Groups) -> None:
        for group in groups:
            for sample in group:
                self._scheduler.end(sample.request, Finish.ABORT)
                self._samples.pop(sample.request, None)
        if not self._scheduler.has_work:
            self._engine.drain()


_KEPT: dict[str, LLM] = {}  # what `generate` keeps, by its options


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
    single = isinstance(prompts, str | Mapping)
    batch = [prompts] if single else list(prompts)
    num_samples = sum(param.n for param in params_of(sampling_params, len(batch)))
    rows = options.get("max_num_seqs") or (1 if num_samples < 2 else 8)
    key = repr((model, sorted(options.items())))
    if key not in _KEPT or _KEPT[key].buckets.max_num_seqs < rows:
        _KEPT.clear()  # one model at a time: the old one's memory goes first
        _KEPT[key] = LLM(model, **{"max_num_seqs": rows, **options})
    outputs = _KEPT[key].generate(batch, sampling_params)
    return outputs[0] if single else outputs


def _model_len(max_model_len: int | None, limit: int) -> int:
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(
            f"max_model_len must not exceed the model's {limit} positions, got {max_model_len}."
        )
    return min(limit, 8192) if max_model_len is None else max_model_len

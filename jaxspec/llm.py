"""Text in, text out; the only file that knows every part and joins them."""

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.config import (
    VARIANTS,
    Buckets,
    SpeculativeConfig,
    Variant,
    default_decode_buckets,
    default_prefill_buckets,
)
from jaxspec.engine import Engine
from jaxspec.models import load_model, resolve_folder
from jaxspec.outputs import Delta, RequestOutput, Sample
from jaxspec.plan import MAX_STOP_IDS
from jaxspec.proposers import make_proposer
from jaxspec.request import Finish, Request, SamplingParams
from jaxspec.runner.compilation_cache import enable_compilation_cache
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.warmup import warm_up
from jaxspec.sampling import ExactVerifier, RejectionVerifier, SyntheticVerifier, Verifier
from jaxspec.scheduler.scheduler import Progress, Scheduler
from jaxspec.tokenizer import StopStrings, Tokenizer

EMBEDDED_MODEL = Path(__file__).parent / "embedded"

Prompt = str | Mapping[str, Any]


class LLM:
    """A model, its engine and its tokenizer.

    Args:
        model: a folder with `config.json` and safetensors, a hub id, or None: the embedded model.
        speculative_config: a `SpeculativeConfig` or a dict of its fields; "auto": MTP with 3
            drafts if the checkpoint has the head; None: plain decoding.
        dtype: "float32", "bfloat16" or "auto" (bfloat16 on a GPU, float32 elsewhere).
        max_num_seqs: samples that run at once.
        max_model_len: tokens of a sample, prompt and output; at most what the model was made for.
        max_in_flight: steps that may be uncollected; 0 is the synchronous engine.
        page_size: tokens of a KV page.
        num_pages: pages of the pool; None: enough for `max_num_seqs` of `max_model_len`.
        max_num_batched_tokens: verified and prefilled tokens of a step together.
        long_prefill_token_threshold: prompt tokens of one request in a step; None: no such limit.
        max_prefill_seqs: prompts that one step may advance.
        decode_buckets, prefill_buckets: sizes that get compiled, ascending.
        seed: of requests that bring no seed of their own.
        compilation_cache: folder of compiled programs; None: the user's cache folder.
        show_progress: progress bars; None: if standard error is a terminal.

    Raises:
        FileNotFoundError: no such model, or a folder without configuration or weights.
        ValueError: an option, the configuration or the weights break a rule.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculative_config: SpeculativeConfig | dict[str, Any] | Literal["auto"] | None = "auto",
        dtype: str = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_in_flight: int = 2,
        page_size: int = 16,
        num_pages: int | None = None,
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
        folder = EMBEDDED_MODEL if model is None else resolve_folder(model)
        self._show_progress = sys.stderr.isatty() if show_progress is None else show_progress
        array_type = _array_type(dtype)
        self._model = load_model(folder, array_type)
        self.tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        text_eos = self.tokenizer.eos_ids if self.tokenizer else ()
        self._eos_ids = tuple(sorted({*self._model.eos_token_ids, *text_eos}))
        config = _speculation(speculative_config, self._model.has_draft_head)
        num_drafts = config.num_speculative_tokens if config else 0
        max_model_len = self._check_model_len(max_model_len)
        budget = max_num_batched_tokens or max(512, 2 * max_num_seqs * (1 + num_drafts))
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages or max_num_seqs * -(-max_model_len // page_size) + 1,
            num_drafts=num_drafts,
            decode_rows=tuple(decode_buckets or default_decode_buckets(max_num_seqs)),
            prefill_tokens=tuple(prefill_buckets or default_prefill_buckets(budget)),
            max_prefill_seqs=max_prefill_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self._proposer = make_proposer(config, self._model.vocab_size) if config else None
        self._runner = ModelRunner(
            self._model,
            self.buckets,
            self._proposer,
            dtype=array_type,
            verifier=make_verifier(config),
        )
        self._scheduler = Scheduler(self.buckets)
        self._engine = Engine(self._scheduler, self._runner, max_in_flight=max_in_flight)
        self._samples: dict[Request, Sample] = {}
        self._seed, self._num_requests = seed, 0

    def warm_up(self, variants: Sequence[Variant] = VARIANTS) -> None:
        """Compile what requests of these kinds need: "greedy", "sampled" (temperature) or "full"
        (top-k, top-p). `generate` does it for what it is given; after it nothing compiles.
        """
        warm_up(self._runner, variants, progress=self._show_progress)

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
        params = _params_of(sampling_params, len(batch))
        encoded = [self._encode(prompt) for prompt in batch]
        groups = self._queue(encoded, params)
        bar = tqdm(
            total=len(groups),
            desc="generating",
            unit="prompt",
            disable=not self._show_progress or len(groups) < 2,
        )
        left = {sample.request for group in groups for sample in group}
        try:
            while left:
                self._step()
                left = {request for request in left if not request.finish}
                done = sum(all(s.request.finish for s in group) for group in groups)
                bar.update(done - bar.n)
        finally:
            bar.close()
            self._forget(groups)
        return [
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else prompt.get("prompt"),
                prompt_token_ids=list(ids),
                outputs=[sample.output() for sample in group],
            )
            for prompt, ids, group in zip(batch, encoded, groups, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """The pieces of one completion as they come. Leaving the loop early aborts the request.

        Raises:
            ValueError: as in `generate`, and for `n` above 1.
        """
        params = _params_of(sampling_params, 1)
        if params[0].n != 1:
            raise ValueError(f"stream gives one sample, got n={params[0].n}; use generate.")
        groups = self._queue([self._encode(prompt)], params)
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
        ids = self._require_tokenizer("chat").chat(list(messages), **template_options)
        return self.generate({"prompt_token_ids": ids}, sampling_params)[0]

    def metrics(self) -> dict[str, Any]:
        """Steps, host times (seconds), preemptions, compiled shapes and bytes on the device."""
        return {
            **vars(self._engine.metrics),
            "num_preemptions": self._scheduler.num_preemptions,
            "max_in_flight": self._engine.max_in_flight,
            "shapes": self.buckets.shapes(),
            "memory_bytes": self._runner.memory(),
        }

    # Requests.

    def _queue(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Sample]]:
        first = self._num_requests
        groups = [
            self._make_samples(tuple(prompt), param, first + number)
            for number, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]
        requests = [sample.request for group in groups for sample in group]
        self._scheduler.check(requests)
        self.warm_up(sorted({param.variant for param in params}, key=VARIANTS.index))
        self._scheduler.add(requests)
        self._num_requests += len(groups)
        self._samples.update((s.request, s) for group in groups for s in group)
        return groups

    def _make_samples(
        self, prompt: tuple[int, ...], params: SamplingParams, number: int
    ) -> list[Sample]:
        stop_ids = tuple(dict.fromkeys(params.stop_token_ids))
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys(stop_ids + self._eos_ids))
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"A request may have {MAX_STOP_IDS} stop token ids, the model's own included, got "
                f"{len(stop_ids)}. Use stop strings for the rest."
            )
        if params.stop:
            self._require_tokenizer("stop strings")
        entropy = [self._seed, number] if params.seed is None else [params.seed % 2**64]
        samples: list[Sample] = []
        for index in range(params.n):
            seed = int(np.random.SeedSequence([*entropy, index]).generate_state(1)[0])
            request = Request(
                prompt=prompt,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                proposer_key=self._proposer.request_key(prompt, seed) if self._proposer else 0,
                leader=samples[0].request if samples else None,
            )
            text = self.tokenizer.stream() if self.tokenizer else None
            stops = StopStrings(list(params.stop)) if params.stop else None
            samples.append(Sample(request, index, text, stops))
        return samples

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._require_tokenizer("text prompts").encode(prompt)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return [int(token) for token in prompt["prompt_token_ids"]]
        if isinstance(prompt, Mapping) and "prompt" in prompt:
            return self._require_tokenizer("text prompts").encode(prompt["prompt"])
        raise ValueError(
            "A prompt is a text or a dict with 'prompt_token_ids' or 'prompt', got "
            f"{type(prompt).__name__}."
        )

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        if what == "prompt" and not ids:
            raise ValueError("A prompt must have at least one token, got none.")
        wrong = [token for token in ids if not 0 <= token < self._model.vocab_size]
        if wrong:
            raise ValueError(
                f"{what}: token ids must be 0..{self._model.vocab_size - 1}, got {wrong[:5]}. They "
                "may come from another model's tokenizer."
            )

    # The loop.

    def _step(self) -> list[tuple[Sample, Delta]]:
        return [self._record(progress) for progress in self._engine.step()]

    def _record(self, progress: Progress) -> tuple[Sample, Delta]:
        sample = self._samples[progress.request]
        delta, stopped = sample.push(progress.tokens)
        if stopped and not progress.request.finish:
            self._scheduler.end(progress.request, Finish.STOP)
        return sample, delta

    def _deltas(self, groups: list[list[Sample]]) -> Iterator[Delta]:
        sample = groups[0][0]
        seen_ids, seen_text = 0, 0
        try:
            while not sample.request.finish:
                self._step()
                # Another caller's loop may have moved this sample on: give what is new.
                if len(sample.token_ids) > seen_ids or sample.request.finish:
                    reason = sample.finish.reason
                    yield Delta(
                        sample.text[seen_text:],
                        sample.token_ids[seen_ids:],
                        reason,
                        sample.request.metrics if reason else None,
                    )
                    seen_ids, seen_text = len(sample.token_ids), len(sample.text)
        finally:
            self._forget(groups)

    def _forget(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            for sample in group:
                self._scheduler.end(sample.request, Finish.ABORT)
                self._samples.pop(sample.request, None)
        if not self._scheduler.has_work:
            self._engine.drain()

    # Set-up.

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} need a tokenizer, and the model's folder has no tokenizer.json. Add it, "
                "or pass {'prompt_token_ids': [...]}."
            )
        return self.tokenizer

    def _check_model_len(self, max_model_len: int | None) -> int:
        limit = self._model.max_position_embeddings
        if max_model_len is None:
            return min(limit, 8192)
        if max_model_len > limit:
            raise ValueError(
                f"max_model_len must not exceed the model's {limit} positions, got {max_model_len}."
            )
        return max_model_len


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
    counts = [param.n for param in _params_of(sampling_params, len(batch))]
    options.setdefault("max_num_seqs", min(max(sum(counts), 1), 8))
    outputs = _cached_llm(model, _freeze(options)).generate(batch, sampling_params)
    return outputs[0] if single else outputs


@functools.lru_cache(maxsize=2)
def _cached_llm(model: str | Path | None, options: tuple) -> LLM:
    return LLM(model, **{name: dict(v) if isinstance(v, _Items) else v for name, v in options})


class _Items(tuple):
    """A dict made hashable."""


def _freeze(options: dict[str, Any]) -> tuple:
    def freeze(value: Any) -> Any:
        if isinstance(value, dict):
            return _Items((k, freeze(v)) for k, v in sorted(value.items()))
        return tuple(freeze(v) for v in value) if isinstance(value, list | tuple) else value

    return tuple((name, freeze(value)) for name, value in sorted(options.items()))


def _params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams(temperature=0.0)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one for all prompts or one each: {count} prompts, "
            f"{len(params)} parameters came."
        )
    return list(params)


def _speculation(
    config: SpeculativeConfig | dict[str, Any] | str | None, has_draft_head: bool
) -> SpeculativeConfig | None:
    if config is None or (config == "auto" and not has_draft_head):
        return None
    if isinstance(config, str):
        if config != "auto":
            raise ValueError(f"speculative_config must be 'auto', None or a dict, got {config!r}.")
        return SpeculativeConfig()
    config = SpeculativeConfig.of(config)
    if config.method == "mtp" and not has_draft_head:
        raise ValueError(
            "Method 'mtp' drafts with the checkpoint's own head, and this checkpoint has no mtp.* "
            "tensors (an export may have dropped them). Pass speculative_config=None."
        )
    return config


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    """How drafts are decided on; plain decoding is exact verification of no drafts."""
    if config is not None and config.synthetic_acceptance_rates is not None:
        return SyntheticVerifier(config.synthetic_acceptance_rates)
    if config is not None and config.draft_sample_method == "probabilistic":
        return RejectionVerifier()
    return ExactVerifier()


def _array_type(dtype: str) -> jnp.dtype:
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or 'auto', got {dtype!r}.")
    return jnp.dtype(dtype)

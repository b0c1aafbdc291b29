"""`LLM`, whose blocking calls step the engine in the calling thread, and `generate`."""

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, Unpack, cast

from jaxspec.api import beam_search, progress_bar
from jaxspec.api.beam_search import BeamSearchOutput, BeamSearchParams
from jaxspec.api.replicated_engine import ReplicatedEngine, replicated
from jaxspec.api.request_transfer import TransferEngine
from jaxspec.api.score import TextScore, scoring_params
from jaxspec.checks import integer
from jaxspec.engine.admission import Admission
from jaxspec.options.engine_options import SIGNATURE, EngineConfig, listing
from jaxspec.options.vllm_options import check_call, without_neutral
from jaxspec.process import check_process, first_process
from jaxspec.requests.outputs import CompletionOutput, RequestOutput, Stream
from jaxspec.requests.prompts import Prompt, TokenizedPrompt, is_one_prompt, params_of, prompts_of
from jaxspec.requests.sampling_params import MAX_LOGPROBS, PROCESSED, SamplingParams
from jaxspec.text.conversations import Messages, TemplateOptions

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(TransferEngine):
    """Model with its engine and tokenizer. Several threads may call it at once.

    `close`, or the end of a `with` block, frees the device memory.

    With `data_parallel_size` above 1, each replica is a process (docs/serving.md#several-gpus). A
    replica that ends fails the calls with requests there with `ReplicaDiedError`, and is restarted.

    `weights` are tensors in place of those of the model, as in `update_weights`; `weight_version`
    (default: "0") is their version (docs/rollouts.md).

    Raises:
        FileNotFoundError: the model does not exist, or its folder has no configuration or weights.
        TypeError: an option is unknown.
        ValueError: an option, the configuration or the weights are invalid, or do not fit into
            memory.
        RuntimeError: this is a forked child of a process that made an LLM.
    """

    __signature__ = SIGNATURE

    def __new__(cls, model: str | Path | None = None, **options: Any) -> "LLM":
        """Create an LLM; with `data_parallel_size` above 1, one whose engines are processes."""
        is_one = options.get("data_parallel_size", 1) == 1 or cls is not LLM
        return object.__new__(cls if is_one else _ReplicatedLLM)

    def __enter__(self) -> "LLM":
        """Return the LLM."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the LLM."""
        self.close()

    def abort(self, request_id: str) -> None:
        """Abort all samples of the requests with this id.

        Any thread may call it while others wait in `generate` or read a stream. Unknown ids and
        finished requests are ignored.

        Args:
            request_id: Id of the requests.

        Raises:
            RuntimeError: the LLM is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        self.session.abort(str(request_id))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: progress_bar.Bar = None,
        priority: int | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts and wait for all of them.

        Args:
            prompts: A prompt or a list of prompts. Each is a text, a list of token ids, or a dict
                (`TextPrompt` or `TokensPrompt`).
            sampling_params: Parameters for all prompts, or a list with one per prompt; None means
                `get_default_sampling_params()`.
            use_tqdm: True or False shows or hides the progress bar, a tqdm class draws it; None
                follows the option `show_progress`.
            priority: Integer for all prompts, or a list with one per prompt. Waiting requests with
                lower values enter the batch first, equal ones in order of arrival. None means 0.
            request_ids: Id of each prompt, for `abort`; None means numbers.
            **others: Arguments of vLLM without a counterpart, such as `lora_request=None`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            TypeError: an argument is unknown.
            ValueError: a prompt or parameter is invalid, or a value of `others` asks for something;
                nothing is queued.
            RuntimeError: the LLM is closed, or this is a forked child of its process.
        """
        self.session.require_usable()
        check_call("generate", others)
        progress_bar.check(use_tqdm)
        groups = self.prepare(prompts_of(prompts), sampling_params, request_ids, priority)
        samples = [sample for group in groups for sample in group]
        with (
            progress_bar.open_bar(use_tqdm, len(samples), is_shown=self._show_progress) as bar,
            contextlib.closing(self.session.run(samples)) as run,
        ):
            for left in run:
                progress_bar.move(bar, samples, len(left))
        return [RequestOutput.of(group) for group in groups]

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        request_ids: Sequence[str] | None = None,
        **others: Any,
    ) -> list[str]:
        """Queue prompts without waiting for them; `wait_for_completion` returns their outputs.

        Args:
            prompts: As in `generate`.
            sampling_params: As in `generate`.
            priority: As in `generate`.
            request_ids: As in `generate`; no two unfinished requests may have the same.
            **others: As in `generate`.

        Returns:
            The id of each request, in the order of the prompts.

        Raises:
            TypeError, ValueError, RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        check_call("enqueue", others)
        groups = self.prepare(prompts_of(prompts), sampling_params, request_ids, priority)
        self._queue(groups)
        return [samples[0].request_id for samples in groups]

    def wait_for_completion(self, *, use_tqdm: progress_bar.Bar = None) -> list[RequestOutput]:
        """Wait for all requests of `enqueue` and `add_request`.

        Args:
            use_tqdm: As in `generate`.

        Returns:
            The whole output of each request, in the order in which they were queued.

        Raises:
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        progress_bar.check(use_tqdm)
        groups = list(self._added.values())
        samples = [sample for group in groups for sample in group]
        with progress_bar.open_bar(use_tqdm, len(samples), is_shown=self._show_progress) as bar:
            left = list(samples)
            while left:
                if left[-1].is_taken:
                    left.pop()
                    continue
                self.step()
                self.session.gate.wait()
                if not bar.disable:
                    progress_bar.move(bar, samples, sum(not each.is_taken for each in samples))
        return [RequestOutput.of(group) for group in groups]

    @property
    def llm_engine(self) -> Self:
        """The engine, which is the LLM itself."""
        return self

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Stream:
        """Stream the output of one prompt.

        The prompt is checked at once and queued at the first `next`. Leaving a
        `with llm.stream(...) as deltas:` block early aborts the request.

        Args:
            prompt: A prompt as in `generate`.
            sampling_params: Parameters; None means `get_default_sampling_params()`.
            priority: As in `generate`.
            request_id: Id for `abort`; None means a number.

        Returns:
            An iterator over the deltas of all samples. `TextDelta.index` is the index of the
            sample. With `output_kind` FINAL_ONLY a sample has one delta, at its end.

        Raises:
            ValueError: as in `generate`, or there are several prompts.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        samples = self.inputs.process_one(prompt, sampling_params, request_id, priority)
        self.admit(samples)
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
        """Complete conversations, rendered by the checkpoint's chat template.

        Args:
            messages: A conversation or a list of conversations. A conversation is a list of
                messages `{"role": ..., "content": ...}`, whose content is a text or a list of
                parts `{"type": "text", "text": ...}`.
            sampling_params: As in `generate`.
            use_tqdm: As in `generate`.
            priority: As in `generate`.
            request_ids: As in `generate`, one per conversation.
            **template: Template options. `chat_template` is the source of another template, or the
                name of one of the checkpoint's. `chat_template_kwargs` is a dict of the template's
                variables, such as `{"enable_thinking": False}`. `tools` is a list of tools as JSON
                values. `add_generation_prompt` (default True) ends the prompt with the start of an
                assistant message. `continue_final_message` (default False) ends it inside the last
                message, and needs `add_generation_prompt=False`.

        Returns:
            One output per conversation, in order.

        Raises:
            TypeError: an argument is unknown.
            ValueError: there is no tokenizer or template, the template refuses the messages, or as
                in `generate`.
            RuntimeError: as in `generate`.
        """
        self.session.require_usable()
        return self.generate(
            self.inputs.chats(messages, cast(TemplateOptions, without_neutral(template))),
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            request_ids=request_ids,
        )

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Stream:
        """Stream the next message of one conversation.

        Args:
            messages: The conversation, as in `chat`.
            sampling_params: As in `stream`.
            priority: As in `stream`.
            request_id: As in `stream`.
            **template: Template options, as in `chat`.

        Returns:
            An iterator over the deltas, as in `stream`.

        Raises:
            TypeError, ValueError, RuntimeError: as in `chat` and `stream`.
        """
        self.session.require_usable()
        prompt = self.inputs.chat(messages, template)
        return self.stream(prompt, sampling_params, priority=priority, request_id=request_id)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        logprobs: int = 0,
        *,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        logprobs_mode: str = PROCESSED,
    ) -> list[TextScore]:
        """Return the log-probability of each token of texts.

        To compare continuations of a common beginning, pass token ids and sum from the position at
        which they diverge: `TextScore.total(start)`. One token is generated after each text, so a
        text must be shorter than `max_model_len`.

        Args:
            prompts: A text or a list of texts, in the forms of `generate`.
            logprobs: Number of likeliest ids to report at each position besides the token itself.
            temperature: Divisor of the logits, above 0. With `top_k` and `top_p` the scores are
                those of tokens drawn with these parameters; -inf for a token that is cut off.
            top_k: As in `SamplingParams`.
            top_p: As in `SamplingParams`.
            logprobs_mode: "raw_logprobs" ignores these three.

        Returns:
            The score of each text.

        Raises:
            ValueError: a parameter is out of range, or as in `generate`.
            RuntimeError: a text was aborted before its scores were computed, or as in `generate`.
        """
        count = integer("logprobs", logprobs, 0, MAX_LOGPROBS)
        params = scoring_params(count, temperature, top_k, top_p, logprobs_mode)
        outputs = self.generate(prompts, params)
        return [TextScore.of(number, output) for number, output in enumerate(outputs, 1)]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt.

        Each step extends all beams of all prompts by one token, in one call of `generate` with the
        beams as prompts.

        Args:
            prompts: A prompt or a list of prompts, as in `generate`.
            params: Parameters of the search.

        Returns:
            The output of each prompt, with `params.beam_width` sequences at most.

        Raises:
            ValueError: `params` are no `BeamSearchParams`, there are too many beams, `max_tokens`
                do not fit after a prompt, or as in `generate`.
            RuntimeError: as in `generate`.
        """
        batch = beam_search.checked_batch(prompts, params)
        whole = dataclasses.replace(params.step, max_tokens=params.max_tokens)
        requests = [samples[0].request for samples in self.prepare(batch, whole)]
        beam_search.check_room(requests, params)

        def next_tokens(beams: list[list[int]]) -> list[CompletionOutput]:
            prompts = [TokenizedPrompt(tuple(tokens)) for tokens in beams]
            outputs = self.generate(prompts, params.step, use_tqdm=False)
            return [output.outputs[0] for output in outputs]

        found = beam_search.search(
            next_tokens,
            [list(request.prompt) for request in requests],
            params,
            () if params.ignore_eos else self.inputs.eos_ids,
        )
        return [BeamSearchOutput.of(sequences, self.tokenizer) for sequences in found]


class _ReplicatedLLM(ReplicatedEngine, LLM):
    """An `LLM` with `data_parallel_size` above 1."""

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Start the processes; the options are those of `LLM`."""
        super().__init__(replicated(model, options), Admission(None, None))


LLM.__doc__ = f"{LLM.__doc__}\n    Args:\n{listing()}\n"


_DEFAULT_LLMS: dict[EngineConfig, LLM] = {}  # LLM of the last `generate`, by its options
_DEFAULT_LLMS_LOCK = threading.Lock()  # held while an LLM is loaded or dropped


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | Path | None = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Any,
) -> RequestOutput | list[RequestOutput]:
    """Complete prompts with the embedded model or another one.

    The `LLM` is kept for the next call with the same model and options.

    Args:
        prompts: A prompt or a list of prompts, as in `LLM.generate`.
        model: A folder, a GGUF file or a hub id; None means the embedded model.
        sampling_params: As in `LLM.generate`.
        **options: Options of `LLM`.

    Returns:
        One output for a single prompt, or a list of outputs for a list of prompts.

    Raises:
        FileNotFoundError, TypeError: as in `LLM`.
        ValueError, RuntimeError: as in `LLM` and `LLM.generate`.
    """
    is_single = is_one_prompt(prompts)
    batch = prompts_of(prompts)
    num_samples = sum(param.n for param in params_of(sampling_params, len(batch)))
    rows = options.get("max_num_seqs") or (1 if num_samples < 2 else 8)
    key = EngineConfig.of(model, options)
    check_process(first_process())  # before the lock: the parent's threads may hold it
    with _DEFAULT_LLMS_LOCK:
        if key not in _DEFAULT_LLMS or _DEFAULT_LLMS[key].shapes.max_num_seqs < rows:
            _DEFAULT_LLMS.clear()  # one model at a time: free its memory, if unused, before loading
            _DEFAULT_LLMS[key] = LLM(model, **{"max_num_seqs": rows, **options})
        llm = _DEFAULT_LLMS[key]
    outputs = llm.generate(batch, sampling_params)
    return outputs[0] if is_single else outputs

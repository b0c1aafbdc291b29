"""Outputs of requests, whole and streamed, and `Sample`, which turns tokens into text."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from jaxspec.checks import shown
from jaxspec.requests.logprobs import Deferred, DeferredLogprobs, Logprob, none, readable
from jaxspec.requests.request import Experts, Finish, Request, RequestMetrics
from jaxspec.requests.sampling_params import RequestOutputKind
from jaxspec.requests.stop_strings import StopStrings
from jaxspec.text.text_stream import TextStream


@dataclasses.dataclass(frozen=True)
class WeightVersionSpan:
    """Consecutive tokens that weights of one version made.

    Attributes:
        version: The version.
        start: Index of the first token.
        end: Index after the last one.
    """

    version: str
    start: int
    end: int


def spans(starts: Sequence[tuple[str, int]], first: int, end: int) -> list[WeightVersionSpan]:
    """Return the spans of the output tokens from `first` to `end`, with indices from `first` on.

    `starts` is `Request.weight_starts`.
    """
    if len(starts) == 1:  # nearly always
        return [WeightVersionSpan(starts[0][0], 0, end - first)] if end > first else []
    ends = [min(start, end) for _, start in starts[1:]] + [end]
    each = [(version, max(start, first)) for version, start in starts]
    return [
        WeightVersionSpan(version, start - first, stop - first)
        for (version, start), stop in zip(each, ends, strict=False)
        if start < stop
    ]


def joined_spans(parts: Iterable[Sequence[WeightVersionSpan]]) -> list[WeightVersionSpan]:
    """Return the spans of consecutive deltas as those of all their tokens."""
    found, end = list[WeightVersionSpan](), 0
    for span in itertools.chain.from_iterable(parts):
        start, end = end, end + span.end - span.start
        if found and found[-1].version == span.version:
            start = found.pop().start
        found.append(WeightVersionSpan(span.version, start, end))
    return found


@dataclasses.dataclass(frozen=True)
class CompletionOutput(DeferredLogprobs):
    """One sample of a prompt.

    Attributes:
        index: Index of the sample among those of its prompt.
        text: Generated text, up to the stop string or stop id, or including it with
            `include_stop_str_in_output`.
        token_ids: Generated tokens, including a final stop id.
        finish_reason: "stop", "length", "error" or "abort"; None while it runs.
        metrics: Times and acceptance counts.
        draft_positions: Origin of each of `token_ids`: 0 for the target, j for accepted draft j of
            its verify step. The last token of a sample that ends at a stop id or its length counts
            as the target's even if it was drafted.
        stop_reason: The stop string, or the id of `stop_token_ids`, that ended the sample; None for
            an end-of-sequence id of the model, for other reasons, and while it runs.
        logprobs: For each of `token_ids` a dict by id: the token's `Logprob` first, then those of
            the likeliest ids at its position. None unless `SamplingParams.logprobs` is set.
        weight_versions: Versions of the weights that made `token_ids`, as consecutive spans that
            cover them (`LLM.update_weights`).
        routed_experts: Experts that each token was routed to, best first, uint8 or uint16
            `[tokens - 1, layers, top_k]`: of the prompt and then of `token_ids` but the last, which
            is not computed, by each layer with experts. None while the sample runs, if it ended
            before its prompt was computed, after an error of the engine, and without
            `enable_return_routed_experts`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    metrics: RequestMetrics
    draft_positions: list[int] = dataclasses.field(default_factory=list)
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = dataclasses.field(default_factory=none)
    weight_versions: list[WeightVersionSpan] = dataclasses.field(default_factory=list)
    routed_experts: Experts | None = dataclasses.field(default=None, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of all `token_ids`; None without `logprobs`."""
        found = self.token_logprobs
        return None if found is None else sum(found.tolist(), start=0.0)

    def finished(self) -> bool:
        """Return whether the sample has finished."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and its samples.

    Attributes:
        prompt: Text of the prompt, for a chat as rendered by its template; None for a prompt given
            as token ids alone.
        prompt_token_ids: Token ids of the prompt.
        outputs: The samples.
        request_id: Id of the request.
        prompt_logprobs: For each prompt token a dict as in `CompletionOutput.logprobs`, and None
            for the first token. None unless `SamplingParams.prompt_logprobs` is set, and if the
            request ended before its prompt was computed.
        num_cached_tokens: Number of prompt tokens in the cached prefix.
        num_pending: Number of unfinished samples without an entry in `outputs`; 0 unless
            `output_kind` is DELTA.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_id: str = ""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_pending: int = 0

    @staticmethod
    def of(samples: "Sequence[Sample]") -> "RequestOutput":
        """Return the current output of all samples of one prompt."""
        first = samples[0]  # if the samples share a prefill, only the first has prompt logprobs
        return RequestOutput(
            prompt=first.prompt_text,
            prompt_token_ids=list(first.request.prompt),
            outputs=[sample.output() for sample in samples],
            request_id=first.request_id,
            prompt_logprobs=first.prompt_logprobs(),
            num_cached_tokens=first.request.num_cached_tokens,
        )

    @staticmethod
    def due(samples: "Sequence[Sample]", deltas: "Sequence[TextDelta]") -> "RequestOutput | None":
        """Return the output that vLLM yields after new deltas, as `output_kind` specifies.

        Args:
            samples: All samples of one prompt.
            deltas: All deltas that were just taken from them, at least one.

        Returns:
            All output so far (CUMULATIVE), that of the deltas (DELTA), or all output once every
            sample has finished and None before (FINAL_ONLY).
        """
        kind = samples[0].request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not all(each.is_taken for each in samples):
            return None
        if kind is not RequestOutputKind.DELTA:
            return RequestOutput.of(samples)
        first, found = samples[0], {delta.index: delta for delta in deltas}
        return RequestOutput(
            prompt=first.prompt_text,
            prompt_token_ids=list(first.request.prompt),
            outputs=[
                CompletionOutput(
                    index=each.index,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    finish_reason=delta.finish_reason,
                    metrics=each.request.metrics,
                    draft_positions=delta.draft_positions,
                    stop_reason=delta.stop_reason,
                    logprobs=delta.logprobs,
                    weight_versions=delta.weight_versions,
                    routed_experts=delta.routed_experts,
                )
                for each in samples
                if (delta := found.get(each.index)) is not None
            ],
            request_id=first.request_id,
            prompt_logprobs=found[first.index].prompt_logprobs if first.index in found else None,
            num_cached_tokens=first.request.num_cached_tokens,
            num_pending=sum(not each.is_taken and each.index not in found for each in samples),
        )

    @property
    def finished(self) -> bool:
        """True if all samples of the prompt have finished."""
        return not self.num_pending and all(output.finished() for output in self.outputs)

    @property
    def metrics(self) -> RequestMetrics:
        """Metrics of all samples together; see `RequestMetrics.total`."""
        return RequestMetrics.total([output.metrics for output in self.outputs])


@dataclasses.dataclass(frozen=True)
class TextDelta(DeferredLogprobs):
    """Output of a streamed sample since its last delta.

    With `output_kind` FINAL_ONLY a sample has one delta, at its end. The fields are those of
    `CompletionOutput`, for the tokens of the delta. Three are set only once:

    Attributes:
        metrics: Set in the last delta of the sample, else None.
        routed_experts: Those of all tokens, set in the last delta of the sample, else None.
        prompt_logprobs: `RequestOutput.prompt_logprobs`, set in the first delta, else None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    metrics: RequestMetrics | None = None
    draft_positions: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = dataclasses.field(default_factory=none)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    index: int = 0
    stop_reason: str | int | None = None
    weight_versions: list[WeightVersionSpan] = dataclasses.field(default_factory=list)
    routed_experts: Experts | None = dataclasses.field(default=None, compare=False)


class Stream(Iterator[TextDelta]):
    """Iterator over the deltas of a prompt's samples. The first `next` queues the request.

    The request ends with the stream: when all samples have finished, at `close`, at the end of a
    `with` block, or when the stream is garbage-collected. A variable that refers to the stream
    keeps the request running after a `break` out of a `for` loop, so iterate in a `with` block.
    """

    def __init__(self, deltas: Generator[TextDelta, None, None], request_id: str):
        """Wrap a generator of deltas."""
        self._deltas, self.request_id = deltas, request_id

    def __next__(self) -> TextDelta:
        """Wait for the next delta."""
        return next(self._deltas)

    def __enter__(self) -> "Stream":
        """Return the stream."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the stream."""
        self.close()

    def close(self) -> None:
        """Abort the request if it still runs, which frees its row.

        Call it from the thread that reads the stream; other threads use `LLM.abort`.
        """
        self._deltas.close()


class Sample:
    """Caller's view of a request: detokenized text, stop-string search, and deltas.

    The request owns the tokens and the finish reason, and only the scheduler changes them.
    """

    def __init__(
        self,
        request: Request,
        stream: TextStream | None,
        stops: StopStrings | None,
        prompt_text: str | None = None,
    ):
        """Create the view; `stream` is None without a tokenizer or with `detokenize=False`."""
        self.prompt_text = prompt_text  # None means that the prompt was given as token ids
        self.request, self.index, self.request_id = request, request.index, request.request_id
        self.text = ""
        self._stream, self._stops = stream, stops
        self._num_read = 0  # number of output tokens processed by `read`
        self._num_tokens_taken = self._num_characters_taken = 0  # returned in deltas so far
        self._is_begun = self.is_taken = False  # the first and the last delta were returned

    def read(self) -> int | None:
        """Append the text of the request's new tokens, up to a stop string.

        A verify step may emit tokens after a stop string, where plain decoding would have ended:
        `Scheduler.cut` removes them.

        Returns:
            The number of output tokens up to and including the one that completed a stop string,
            or None if no stop string was completed.
        """
        if self._stream is None:
            return None
        tokens = self.request.tokens[len(self.request.prompt) + self._num_read :]
        if tokens and self._ends_with_a_hidden_token:
            tokens.pop()
        if self._stops is None:
            self.text += self._stream.push(tokens)
            self._num_read += len(tokens)
        else:
            for token in tokens:
                text = self._stream.push([token])
                self._num_read += 1
                self.text += self._stops.push(text, may_end=self._may_end)
                if self._stops.matched is not None:
                    return self._num_read
        # After an abort held-back text is dropped: it may be the start of a stop string.
        has_rest = self.request.finish not in (Finish.RUNNING, Finish.ABORT)
        return self._read_rest() if has_rest else None

    @property
    def is_copied(self) -> bool:
        """True if `take` and `output` would not wait for the device."""
        routes = self.request.routes
        return not self.request.finish or routes is None or routes.is_ready

    @property
    def is_settled(self) -> bool:
        """True if no stop string can shorten the finished sample after `read`."""
        return True

    def resume(self) -> None:
        """Skip the output tokens of an imported request: `take` returns only what follows them.

        Raises:
            ValueError: these tokens complete a stop string, so the request has already ended.
        """
        if self.read() is not None:
            raise ValueError(
                f"A request that goes on must not have ended, and the output of request "
                f"{shown(self.request_id)} has a stop string. Keep its text as it is."
            )
        self._num_tokens_taken, self._num_characters_taken = self.request.num_output, len(self.text)

    @property
    def stop_reason(self) -> str | int | None:
        """See `CompletionOutput`."""
        if self.request.finish is not Finish.STOP:
            return None
        if self._stops is not None and self._stops.matched is not None:
            return self._stops.matched
        token = self.request.tokens[-1]
        return None if token in self.request.own_eos else token

    @property
    def _ends_with_a_hidden_token(self) -> bool:
        """True if the newest token is a stop id that is not part of the text."""
        is_hidden = not self.request.params.include_stop_str_in_output
        return is_hidden and self.request.finish is Finish.STOP

    @property
    def _may_end(self) -> bool:
        """True if a stop string completed by the last read token ends the sample."""
        return self._num_read > self.request.params.min_tokens

    def _read_rest(self) -> int | None:
        """Append the held-back text at the end, which may complete a stop string."""
        assert self._stream is not None
        rest = self._stream.flush()
        if self._stops is None:
            self.text += rest
            return None
        self.text += self._stops.push(rest, may_end=self._may_end)
        if self._stops.matched is not None:
            return self.request.num_output
        self.text += self._stops.flush()
        return None

    def take(self) -> TextDelta | None:
        """Return the next delta, or None without new tokens and a new end.

        With `output_kind` FINAL_ONLY there is one delta of all output, at the end.
        """
        request = self.request
        is_whole = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        is_over = bool(request.finish) and not self.is_taken
        if not is_over and (is_whole or request.num_output <= self._num_tokens_taken):
            return None
        first, start = (0, 0) if is_whole else (self._num_tokens_taken, self._num_characters_taken)
        self._num_tokens_taken, self._num_characters_taken = request.num_output, len(self.text)
        is_first, self.is_taken = not self._is_begun, is_over
        self._is_begun = True
        tokens = request.output[first:]
        return TextDelta(
            text=self.text[start:],
            token_ids=tokens,
            finish_reason=request.finish.reason,
            metrics=request.metrics if is_over else None,
            draft_positions=request.draft_positions[first : request.num_output],
            index=self.index,
            stop_reason=self.stop_reason,
            logprobs=self._logprobs(first, tokens),
            weight_versions=spans(request.weight_starts, first, request.num_output),
            prompt_logprobs=self.prompt_logprobs() if is_first else None,
            routed_experts=self._routed_experts() if is_over else None,
        )

    def output(self) -> CompletionOutput:
        """Return all output so far."""
        return CompletionOutput(
            index=self.request.index,
            text=self.text,
            token_ids=self.request.output,
            finish_reason=self.request.finish.reason,
            metrics=self.request.metrics,
            draft_positions=self.request.draft_positions[: self.request.num_output],
            logprobs=self._logprobs(0, self.request.output),
            stop_reason=self.stop_reason,
            weight_versions=spans(self.request.weight_starts, 0, self.request.num_output),
            routed_experts=self._routed_experts(),
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return `RequestOutput.prompt_logprobs`, or None unless this sample has all of them.

        Samples that share a parent's prefill have none.
        """
        num_top, rows = self.request.params.prompt_logprobs, self.request.prompt_logprobs[1:]
        if num_top is None or any(row is None for row in rows):
            return None
        return [None, *readable(rows, self.request.prompt[1:], num_top, self._text_of)]

    def _routed_experts(self) -> Experts | None:
        request = self.request
        # After an error the copies of an earlier preemption may have failed, too.
        if request.finish in (Finish.RUNNING, Finish.ERROR) or request.routes is None:
            return None
        return request.routes.between(request.first_route, len(request.tokens) - 1)

    def _logprobs(self, first: int, tokens: list[int]) -> Any:
        """Return the deferred logprobs of `tokens`, which begin at output index `first`."""
        num_top = self.request.params.logprobs
        if num_top is None:
            return None
        rows = self.request.logprobs[first : first + len(tokens)]
        make = functools.partial(readable, rows, list(tokens), num_top, self._text_of)
        return Deferred(make, rows)

    @property
    def _text_of(self) -> Callable[[int], str] | None:
        return None if self._stream is None else self._stream.text_of


def taken(samples: Iterable[Sample]) -> list[TextDelta]:
    """Return the next delta of each sample that has one."""
    return [delta for sample in samples if (delta := sample.take()) is not None]

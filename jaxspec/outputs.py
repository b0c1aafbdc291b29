"""What users get back, and the text that grows as a request's tokens arrive."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from jaxspec.checks import shown
from jaxspec.logprobs import Deferred, DeferredLogprobs, Logprob, none, readable
from jaxspec.request import Finish, Request, RequestMetrics
from jaxspec.sampling_params import RequestOutputKind
from jaxspec.stop_strings import StopStrings
from jaxspec.text_stream import TextStream


@dataclasses.dataclass(frozen=True)
class CompletionOutput(DeferredLogprobs):
    """One sample.

    `stop_reason` is the stop string, or the id of `stop_token_ids`, that ended it; None for the
    model's own end, for a length, and while it runs.
    `draft_positions` says of each of `token_ids` who gave it: 0 the target itself, j the draft j of
    its verify, which the target let stand. The last token of a sample that ends at a stop id or its
    length counts as the target's, drafted or not.

    `logprobs` has a dict for each of `token_ids`: the token's own `Logprob` by its id, then those
    of the likeliest ids in its place. It is None unless `SamplingParams.logprobs` asks for it.
    """

    index: int
    text: str  # ends before what stopped it, unless that was asked for
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "error", "abort"
    metrics: RequestMetrics
    draft_positions: list[int] = dataclasses.field(default_factory=list)
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = dataclasses.field(default_factory=none)

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all `token_ids` together; None without `logprobs`."""
        if self.logprobs is None:
            return None
        places = zip(self.token_ids, self.logprobs, strict=True)
        return sum((entry[token].logprob for token, entry in places), start=0.0)

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and its samples.

    `prompt_logprobs` has for each prompt token what `CompletionOutput.logprobs` has for its tokens,
    and None for the first one, which nothing predicts. As a whole it is None unless
    `SamplingParams.prompt_logprobs` asks for it, or if the request ended before its prompt was
    read.
    """

    prompt: str | None  # a chat as its template wrote it; None: it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_id: str = ""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0  # of the prompt, found computed by earlier requests

    @staticmethod
    def of(prompt: str | None, samples: "Sequence[Sample]") -> "RequestOutput":
        """The samples of one prompt as they stand."""
        first = samples[0]  # others may share its prompt, and then only this one has read it
        return RequestOutput(
            prompt=prompt,
            prompt_token_ids=list(first.request.prompt),
            outputs=[sample.output() for sample in samples],
            request_id=first.request_id,
            prompt_logprobs=first.prompt_logprobs(),
            num_cached_tokens=first.request.num_cached_tokens,
        )

    @property
    def finished(self) -> bool:
        """Whether all of its samples have ended."""
        return all(output.finished() for output in self.outputs)

    @property
    def metrics(self) -> RequestMetrics:
        """Those of all samples together; see `RequestMetrics.total`."""
        return RequestMetrics.total([output.metrics for output in self.outputs])


@dataclasses.dataclass(frozen=True)
class TextDelta(DeferredLogprobs):
    """What a streamed sample got since the delta before it, or what its `output_kind` asks for."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    metrics: RequestMetrics | None = None  # with the last one
    draft_positions: list[int] = dataclasses.field(default_factory=list)  # as `CompletionOutput`'s
    # As `CompletionOutput`'s.
    logprobs: list[dict[int, Logprob]] | None = dataclasses.field(default_factory=none)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # with the first one
    index: int = 0  # of the sample
    stop_reason: str | int | None = None  # as `CompletionOutput`'s


class Stream(Iterator[TextDelta]):
    """The pieces of a prompt's samples as they come. The first `next` queues the request.

    The request ends with the stream: when its samples are whole, at `close`, behind a `with`
    block, or when nothing refers to the stream any more. A variable that holds the stream keeps it
    alive behind a `for` loop that was left early, so read it in a `with` block.
    """

    def __init__(self, deltas: Generator[TextDelta, None, None], request_id: str):
        """Pass `deltas` on."""
        self._deltas, self.request_id = deltas, request_id

    def __next__(self) -> TextDelta:
        """Wait for the next piece."""
        return next(self._deltas)

    def __enter__(self) -> "Stream":
        """The stream itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the request if it runs; its row is free then.

        Only the thread that reads the stream may call it; for others there is `LLM.abort`.
        """
        self._deltas.close()


class Sample:
    """A request as its caller sees it: the text of its tokens, and the search for stop strings.

    The request owns the tokens and the reason why they ended; the scheduler alone changes both.
    """

    def __init__(self, request: Request, stream: TextStream | None, stops: StopStrings | None):
        """Without `stream` (no tokenizer, or none wanted) there is no text."""
        self.request, self.index, self.request_id = request, request.index, request.request_id
        self.text = ""
        self._stream, self._stops = stream, stops
        self._num_read = 0  # output tokens that `read` has seen
        # What the deltas so far gave.
        self._num_tokens_taken = self._num_characters_taken = 0
        self._is_begun = self.is_taken = False  # a delta has told its beginning, and its end

    def read(self) -> int | None:
        """Add the text of the tokens that the request got since the last call.

        Returns how many output tokens there are up to a stop string, if one was completed. A verify
        step may run past a stop string that plain decoding would have seen first; what lies behind
        it was never generated, and `Scheduler.cut` takes it away.
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
        # After an abort nobody knows what the text that is held back would have become.
        has_rest = self.request.finish not in (Finish.RUNNING, Finish.ABORT)
        return self._read_rest() if has_rest else None

    @property
    def is_settled(self) -> bool:
        """Whether no stop string cuts it any more, once `read` has seen its end."""
        return True

    def resume(self) -> None:
        """Begin behind the tokens that the request came with: `take` tells what follows them.

        Raises:
            ValueError: they complete a stop string, behind which nothing follows.
        """
        if self.read() is not None:
            raise ValueError(
                f"A request that goes on must not have ended, and the output of request "
                f"{shown(self.request_id)} has a stop string. Keep its text as it is."
            )
        self._num_tokens_taken, self._num_characters_taken = self.request.num_output, len(self.text)

    @property
    def stop_reason(self) -> str | int | None:
        """As `CompletionOutput`'s."""
        if self.request.finish is not Finish.STOP:
            return None
        if self._stops is not None and self._stops.matched is not None:
            return self._stops.matched
        token = self.request.tokens[-1]
        return None if token in self.request.own_eos else token

    @property
    def _ends_with_a_hidden_token(self) -> bool:
        """Whether the newest token is a stop id, which the text does not show."""
        is_hidden = not self.request.params.include_stop_str_in_output
        return is_hidden and self.request.finish is Finish.STOP

    @property
    def _may_end(self) -> bool:
        """Whether a stop string that the token just read completes ends the sample."""
        return self._num_read > self.request.params.min_tokens

    def _read_rest(self) -> int | None:
        """Add what was held back until the end, in which a stop string may be completed."""
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
        """What came since the last call, or None if neither tokens nor the end came.

        With another `output_kind` than DELTA: all that came, or None until the end came.
        """
        request, kind = self.request, self.request.params.output_kind
        is_over = bool(request.finish) and not self.is_taken
        is_due = is_over or (
            request.num_output > self._num_tokens_taken and kind is not RequestOutputKind.FINAL_ONLY
        )
        if not is_due:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        first, start = (self._num_tokens_taken, self._num_characters_taken) if is_delta else (0, 0)
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
            prompt_logprobs=self.prompt_logprobs() if is_first else None,
        )

    def output(self) -> CompletionOutput:
        """The sample as it stands."""
        return CompletionOutput(
            index=self.request.index,
            text=self.text,
            token_ids=self.request.output,
            finish_reason=self.request.finish.reason,
            metrics=self.request.metrics,
            draft_positions=self.request.draft_positions[: self.request.num_output],
            logprobs=self._logprobs(0, self.request.output),
            stop_reason=self.stop_reason,
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """`RequestOutput.prompt_logprobs`, as far as this sample has read its prompt itself."""
        num_top, rows = self.request.params.prompt_logprobs, self.request.prompt_logprobs[1:]
        if num_top is None or any(row is None for row in rows):
            return None
        return [None, *readable(rows, self.request.prompt[1:], num_top, self._text_of)]

    def _logprobs(self, first: int, tokens: list[int]) -> Any:
        """`CompletionOutput.logprobs` of `tokens`, the output's from number `first` on."""
        num_top = self.request.params.logprobs
        if num_top is None:
            return None
        rows = self.request.logprobs[first : first + len(tokens)]
        return Deferred(functools.partial(readable, rows, list(tokens), num_top, self._text_of))

    @property
    def _text_of(self) -> Callable[[int], str] | None:
        return None if self._stream is None else self._stream.text_of


def taken(samples: Iterable[Sample]) -> list[TextDelta]:
    """What came of each of the samples since it was last taken, if anything did."""
    return [delta for sample in samples if (delta := sample.take()) is not None]

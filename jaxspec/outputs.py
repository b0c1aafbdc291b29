"""What users get back, and how it grows as tokens arrive."""

import dataclasses
from collections.abc import Sequence

from jaxspec.request import Finish, Request, RequestMetrics
from jaxspec.stop_strings import StopStrings
from jaxspec.tokenizer import TextStream


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str  # without special tokens; ends before a stop string
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "error", "abort"
    metrics: RequestMetrics
    logprobs: None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and its samples."""

    prompt: str | None  # None: it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def metrics(self) -> RequestMetrics:
        """Of all samples together; see `RequestMetrics.total`."""
        return RequestMetrics.total([output.metrics for output in self.outputs])


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step added to a streamed sample."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    metrics: RequestMetrics | None = None  # with the last one


class Sample:
    """A request's growing output: tokens, text, and the search for stop strings."""

    def __init__(
        self, request: Request, index: int, text: TextStream | None, stops: StopStrings | None
    ):
        """Without `text` (no tokenizer) only token ids grow."""
        self.request, self.index = request, index
        self.token_ids: list[int] = []
        self.text = ""
        self._stream, self._stops = text, stops

    def push(self, tokens: Sequence[int]) -> None:
        """Add what a step gave, up to the token that completes a stop string.

        A verify step may run past a stop string that plain decoding would have seen first; what
        lies behind it was never generated.
        """
        if self._stops is None:
            self._take(tokens)
        else:
            for token in tokens:
                self._take([token])
                if self._has_stopped:
                    self.request.metrics.num_tokens = len(self.token_ids)
                    break
        if self.request.finish and not self._has_stopped and self._stream is not None:
            self.text += self._search(self._stream.flush())
            if self._stops is not None and not self._has_stopped:
                self.text += self._stops.flush()

    def _take(self, tokens: Sequence[int]) -> None:
        self.token_ids += tokens
        if self._stream is not None:
            self.text += self._search(self._stream.push(tokens))

    @property
    def finish(self) -> Finish:
        """Why it ended: a stop string counts before what the device found behind it."""
        return Finish.STOP if self._has_stopped else self.request.finish

    @property
    def _has_stopped(self) -> bool:
        return self._stops is not None and self._stops.matched is not None

    def _search(self, text: str) -> str:
        return text if self._stops is None else self._stops.push(text)

    def output(self) -> CompletionOutput:
        """The sample as it stands."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            finish_reason=self.finish.reason,
            metrics=self.request.metrics,
        )

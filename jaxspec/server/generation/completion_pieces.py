"""Choices of completions, built from deltas: text, echoed prompt, logprobs, token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from jaxspec.api.async_llm import AsyncStream
from jaxspec.requests.outputs import TextDelta, WeightVersionSpan, joined_spans
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.generation.logprobs import LegacyLogprobs, prompt_logprobs
from jaxspec.server.protocol import CompletionRequest
from jaxspec.text.tokenizer import Tokenizer


class CompletionPiece(NamedTuple):
    """Addition to a choice; fields that were not requested are None."""

    text: str
    logprobs: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None
    weight_versions: Sequence[WeightVersionSpan] | None = None  # of `token_ids`
    prompt_token_ids: Sequence[int] | None = None  # in the first piece
    prompt_logprobs: Sequence[Any] | None = None  # in the first piece

    @property
    def is_empty(self) -> bool:
        """True if it adds nothing, as for a token that ends within a character."""
        is_plain = self.logprobs is None and self.token_ids is None
        return not self.text and self.finish_reason is None and is_plain

    def as_bytes(self, number: int) -> bytes:
        """Return the JSON choice of a chunk."""
        extras = {name: value for name in _EXTRAS if (value := getattr(self, name)) is not None}
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            number,
            orjson.dumps(self.text),
            b"null" if self.logprobs is None else orjson.dumps(self.logprobs),
            orjson.dumps(self.finish_reason),
            b"," + orjson.dumps(extras)[1:-1] if extras else b"",
        )


# Fields of vLLM's API.
_EXTRAS = ("stop_reason", "token_ids", "weight_versions", "prompt_token_ids", "prompt_logprobs")


class CompletionPieces:
    """Converts the deltas of one request to `CompletionPiece`s."""

    def __init__(self, body: CompletionRequest, params: SamplingParams, tokenizer: Tokenizer):
        self._body, self._params, self._tokenizer = body, params, tokenizer
        self._readers = dict[int, LegacyLogprobs | None]()  # by choice, from its first delta on

    def of(self, number: int, delta: TextDelta, stream: AsyncStream) -> CompletionPiece:
        """Convert a delta of choice `number`, read from `stream`."""
        body, is_first = self._body, number not in self._readers
        is_silent = is_for_prompt_alone(body)
        text = "" if is_silent else delta.text
        tokens = [] if is_silent else list(delta.token_ids)
        places = [] if is_silent else list(delta.logprobs or ())
        piece = CompletionPiece(
            text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=tokens if body.return_token_ids else None,
            weight_versions=delta.weight_versions if body.return_token_ids and tokens else None,
        )
        if is_first:
            self._begin(number)
            prompt_ids = stream.prompt_token_ids
            asked = self._params.prompt_logprobs is not None
            of_prompt = (stream.prompt_logprobs if asked else None) or []
            if body.echo:
                piece = piece._replace(text=self._prompt_text(number, prompt_ids) + text)
                tokens, places = [*prompt_ids, *tokens], [*of_prompt, *places]
            if body.return_token_ids:
                piece = piece._replace(prompt_token_ids=list(prompt_ids))
            if body.prompt_logprobs is not None:
                piece = piece._replace(prompt_logprobs=prompt_logprobs(of_prompt))
        reader = self._readers[number]
        return piece if reader is None else piece._replace(logprobs=reader.read(places, tokens))

    def _begin(self, number: int) -> None:
        num_top, as_ids = self._body.logprobs, bool(self._body.return_tokens_as_token_ids)
        self._readers[number] = (
            None if num_top is None else LegacyLogprobs(num_top, self._tokenizer, as_ids=as_ids)
        )

    def _prompt_text(self, number: int, token_ids: Sequence[int]) -> str:
        prompt = self._body.prompts[number // self._params.n]
        if isinstance(prompt, str) and self._params.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(token_ids, self._params.skip_special_tokens)


def is_for_prompt_alone(body: CompletionRequest) -> bool:
    """Return whether only the echoed prompt is requested, usually for its logprobs.

    The engine generates at least one token, which is left out of the answer.
    """
    return bool(body.echo) and body.max_tokens == 0


def joined(pieces: Sequence[CompletionPiece]) -> CompletionPiece:
    first, last = pieces[0], pieces[-1]
    logprobs, token_ids, weight_versions = None, None, None
    if first.logprobs is not None:
        parts = [piece.logprobs or {} for piece in pieces]
        logprobs = {name: [x for each in parts for x in each[name]] for name in first.logprobs}
    if first.token_ids is not None:
        token_ids = [token for piece in pieces for token in piece.token_ids or ()]
        weight_versions = joined_spans(piece.weight_versions or () for piece in pieces)
    return first._replace(
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=token_ids,
        weight_versions=weight_versions,
    )

"""What the deltas of a chat add to its choices: reasoning, content, tool calls, logprobs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from jaxspec.outputs import TextDelta
from jaxspec.painted_text import Piece as Token
from jaxspec.server.ids import new_id
from jaxspec.server.logprobs import chat_logprobs
from jaxspec.server.painter import Painted, Painter
from jaxspec.server.parsers import OutputParser, Piece, assemble
from jaxspec.server.protocol.chat import ChatCompletionRequest
from jaxspec.tokenizer import Tokenizer


class ChatPiece(NamedTuple):
    """What a choice gets; a field that a request did not ask for is None."""

    pieces: Sequence[Piece]
    logprobs: list[dict[str, Any]] | None = None  # an entry a token
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    unfinished: Mapping[int, str] = {}  # with the last one, as `OutputParser.unfinished`
    tokens: Sequence[Sequence[Token]] | None = None  # of each piece

    def as_bytes(self, number: int) -> list[bytes]:
        """The choices of its chunks, in JSON: one a piece, and one for the end."""
        deltas = [_delta(piece) for piece in self.pieces]
        if not deltas and (self.logprobs or self.token_ids):
            deltas = [b'{"content":""}']
        extras = b"null"
        if self.logprobs is not None:
            extras = orjson.dumps({"content": self.logprobs, "refusal": None})
        if self.token_ids is not None:
            extras += b',"token_ids":' + orjson.dumps(self.token_ids)
        found = []
        for place, delta in enumerate(deltas):
            if self.tokens:
                extras += b',"tokens":' + orjson.dumps(
                    [tuple(token) for token in self.tokens[place]]
                )
            found.append(_choice(number, delta, extras, b"null"))
            extras = b"null"  # all tokens are told with the first
        if self.finish_reason is not None:
            end = orjson.dumps(self.finish_reason)
            if self.stop_reason is not None:
                end += b',"stop_reason":' + orjson.dumps(self.stop_reason)
            found.append(_choice(number, b"{}", b"null", end))
        return found


def first_choice(number: int) -> bytes:
    """The choice of the chunk with which a message begins."""
    return _choice(number, b'{"role":"assistant","content":""}', b"null", b"null")


class ChatPieces:
    """Makes pieces of one request's deltas."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        make_parser: Callable[[], OutputParser],
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
    ):
        """`make_parser`: makes what reads the text of a choice.

        `skip_special_tokens`: as in the request's `SamplingParams`.
        """
        self._body, self._make_parser, self._tokenizer = body, make_parser, tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._parsers = dict[int, OutputParser]()  # by choice
        self._painters = dict[int, Painter]()  # by choice, for a request that wants tokens
        self._is_single = body.parallel_tool_calls is False

    def of(self, number: int, delta: TextDelta) -> ChatPiece:
        """What a delta of choice `number` adds."""
        parser = self._parsers.get(number)
        if parser is None:
            parser = self._begin(number)
        painted, reason, unfinished = self._read(number, parser, delta), delta.finish_reason, {}
        if reason is not None:
            unfinished = parser.unfinished
            if reason == "stop" and parser.num_tool_calls:
                reason = "tool_calls"
        if self._is_single:
            painted = [(piece, tokens) for piece, tokens in painted if not piece.index]
        pieces = [piece for piece, _ in painted]
        tokens = [tokens for _, tokens in painted] if self._body.return_tokens else None
        num_top, logprobs = self._body.num_logprobs, None
        if num_top is not None:
            logprobs = chat_logprobs(delta.logprobs or (), num_top, self._tokenizer)
        ids = list(delta.token_ids) if self._body.return_token_ids else None
        return ChatPiece(pieces, logprobs, reason, delta.stop_reason, ids, unfinished, tokens)

    def _begin(self, number: int) -> OutputParser:
        parser = self._parsers[number] = self._make_parser()
        if self._body.return_tokens:
            self._painters[number] = Painter(
                parser, self._tokenizer, skip_special_tokens=self._skip_special_tokens
            )
        return parser

    def _read(self, number: int, parser: OutputParser, delta: TextDelta) -> list[Painted]:
        if self._body.return_tokens:
            return self._painters[number].read(delta)
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.flush()
        return [(piece, []) for piece in pieces]


@dataclasses.dataclass
class Choice:
    """A choice as a whole, from its pieces."""

    pieces: list[Piece] = dataclasses.field(default_factory=list)
    last: ChatPiece = ChatPiece(())
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)

    def add(self, piece: ChatPiece) -> None:
        """Take what came."""
        self.pieces += piece.pieces
        self.logprobs += piece.logprobs or ()
        self.token_ids += piece.token_ids or ()
        self.last = piece

    def as_object(self, number: int) -> dict[str, Any]:
        """OpenAI's object."""
        told = assemble(self.pieces, self.last.unfinished)
        message: dict[str, Any] = {"role": "assistant", "content": told.content, "refusal": None}
        if told.reasoning:  # agents read the one name or the other
            message |= {"reasoning_content": told.reasoning, "reasoning": told.reasoning}
        if told.tool_calls:
            message["content"] = told.content or None
            message["tool_calls"] = [
                {"id": new_id("call_"), "type": "function", "function": call._asdict()}
                for call in told.tool_calls
            ]
        has_logprobs, has_ids = self.last.logprobs is not None, self.last.token_ids is not None
        choice: dict[str, Any] = {
            "index": number,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if has_logprobs else None,
            "finish_reason": self.last.finish_reason,
            "stop_reason": self.last.stop_reason,
        }
        return choice | {"token_ids": self.token_ids} if has_ids else choice


def _choice(number: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
        number,
        delta,
        logprobs,
        finish_reason,
    )


def _delta(piece: Piece) -> bytes:
    text = orjson.dumps(piece.text)
    if piece.kind == "content":
        return b'{"content":%b}' % text
    if piece.kind == "reasoning":
        return b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
    if piece.kind == "tool_arguments":
        function = b'{"index":%d,"function":{"arguments":%b}}' % (piece.index, text)
    else:
        call_id = new_id("call_").encode()
        head = b'{"index":%d,"id":"%b","type":"function",' % (piece.index, call_id)
        function = head + b'"function":{"name":%b,"arguments":""}}' % text
    return b'{"tool_calls":[%b]}' % function

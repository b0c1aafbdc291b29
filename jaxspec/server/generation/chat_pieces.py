"""Choices of chat answers, built from deltas: reasoning, content, tool calls, logprobs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from jaxspec.requests.outputs import TextDelta, WeightVersionSpan, joined_spans
from jaxspec.server.generation.logprobs import chat_logprobs
from jaxspec.server.protocol import ChatCompletionRequest
from jaxspec.server.translate.fields import new_id
from jaxspec.text.parsers import OutputParser, Piece, assemble
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.viz.colored_tokens import Piece as Token
from jaxspec.viz.colored_tokens import TokenPieces

AttributedPiece = tuple[Piece, list[Token]]
"""A parser's piece and the tokens that its text consists of; none for tool calls."""


class TokenAttribution:
    """Feeds one sample to a parser token by token and attributes the parsed pieces to tokens.

    A parser delays text that may be a tag, and removes tags. So each piece is searched for in the
    parser's recent input, backwards from its end; the position found gives the piece's tokens.
    """

    def __init__(self, parser: OutputParser, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        """`skip_special_tokens`: value in the sample's `SamplingParams`."""
        self._parser = parser
        self._splitter = TokenPieces(tokenizer, skip_special_tokens=skip_special_tokens)
        self._coming = list[Token]()  # tokens whose text was not in a delta yet
        self._inside = list[Token]()  # parser input after its last piece of text

    def read(self, delta: TextDelta) -> list[AttributedPiece]:
        """Return the pieces of a delta; the last delta flushes the parser."""
        self._coming += self._splitter.push(delta.token_ids, delta.draft_positions)
        is_over = delta.finish_reason is not None
        if is_over:
            self._coming += self._splitter.flush()
        found = list[AttributedPiece]()
        for token in self._take(delta.text):
            self._inside.append(token)
            found += self._attributed(self._parser.push(token.text))
        if is_over:
            found += self._attributed(self._parser.flush())
        return _joined(found)

    def _take(self, text: str) -> list[Token]:
        """Remove and return the tokens that make up `text`; a stop string may cut the last one."""
        tokens, rest = _parts(self._coming, 0, len(text)), _parts(self._coming, len(text), None)
        if "".join(token.text for token in tokens) != text:  # decoded with other options
            tokens = [Token(text, tokens[-1].position if tokens else 0)]
        self._coming = rest
        return tokens

    def _attributed(self, pieces: Sequence[Piece]) -> list[AttributedPiece]:
        if all(piece.kind.startswith("tool") for piece in pieces):
            return [(piece, []) for piece in pieces]  # an invalid call may become text later
        given = "".join(token.text for token in self._inside)
        found, end, rest = list[AttributedPiece](), len(given), 0
        for piece in reversed(pieces):
            if piece.kind.startswith("tool"):
                found.append((piece, []))
                continue
            start = given.rfind(piece.text, 0, end)
            if start < 0:  # no existing parser adds text
                found.append((piece, [Token(piece.text, self._inside[-1].position)]))
                continue
            end = start
            rest = max(rest, start + len(piece.text))
            found.append((piece, _parts(self._inside, start, start + len(piece.text))))
        self._inside = _parts(self._inside, rest, None)
        return found[::-1]


def _parts(tokens: Sequence[Token], start: int, end: int | None) -> list[Token]:
    """Return the parts of tokens within characters `start` to `end` of their joined texts.

    A token without text belongs to the character after it.
    """
    found, place = list[Token](), 0
    for token in tokens:
        first, last = place, place + len(token.text)
        place = last
        is_inside = last > start if token.text else first >= start
        if is_inside and (end is None or first < end):
            text = token.text[max(0, start - first) : None if end is None else end - first]
            found.append(Token(text, token.position))
    return found


def _joined(found: Sequence[AttributedPiece]) -> list[AttributedPiece]:
    """Merge adjacent pieces of the same kind and call."""
    joined = list[AttributedPiece]()
    for piece, tokens in found:
        before = joined[-1][0] if joined else None
        if before is not None and (before.kind, before.index) == (piece.kind, piece.index):
            joined[-1] = (before._replace(text=before.text + piece.text), joined[-1][1] + tokens)
        else:
            joined.append((piece, tokens))
    return joined


class ChatPiece(NamedTuple):
    """Addition to a choice; fields that were not requested are None."""

    pieces: Sequence[Piece]
    logprobs: list[dict[str, Any]] | None = None  # one entry per token
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    unfinished: Mapping[int, str] = {}  # `OutputParser.unfinished`, in the last piece
    tokens: Sequence[Sequence[Token]] | None = None  # of each of `pieces`
    weight_versions: Sequence[WeightVersionSpan] = ()  # of `token_ids`

    def without_reasoning(self) -> "ChatPiece":
        kept = [n for n, piece in enumerate(self.pieces) if piece.kind != "reasoning"]
        tokens = None if self.tokens is None else [self.tokens[n] for n in kept]
        return self._replace(pieces=[self.pieces[n] for n in kept], tokens=tokens)

    def as_bytes(self, number: int) -> list[bytes]:
        """Return the JSON choices of its chunks: one per piece and one for the finish reason."""
        deltas = [_delta(piece) for piece in self.pieces]
        if not deltas and (self.logprobs or self.token_ids):
            deltas = [b'{"content":""}']
        extras = b"null"
        if self.logprobs is not None:
            extras = orjson.dumps({"content": self.logprobs, "refusal": None})
        if self.token_ids is not None:
            extras += b',"token_ids":' + orjson.dumps(self.token_ids)
            extras += b',"weight_versions":' + orjson.dumps(self.weight_versions)
        found = []
        for place, delta in enumerate(deltas):
            if self.tokens:
                extras += b',"tokens":' + orjson.dumps(
                    [tuple(token) for token in self.tokens[place]]
                )
            found.append(_choice(number, delta, extras, b"null"))
            extras = b"null"  # logprobs and ids of all tokens are in the first chunk
        if self.finish_reason is not None:
            end = orjson.dumps(self.finish_reason)
            if self.stop_reason is not None:
                end += b',"stop_reason":' + orjson.dumps(self.stop_reason)
            found.append(_choice(number, b"{}", b"null", end))
        return found


def first_choice(number: int) -> bytes:
    """Return the JSON choice of a message's first chunk."""
    return _choice(number, b'{"role":"assistant","content":""}', b"null", b"null")


class ChatPieces:
    """Converts the deltas of one request to `ChatPiece`s."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        make_parser: Callable[[], OutputParser],
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
    ):
        """`make_parser`: returns the output parser of a choice.

        `skip_special_tokens`: value in the request's `SamplingParams`.
        """
        self._body, self._make_parser, self._tokenizer = body, make_parser, tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._parsers = dict[int, OutputParser]()  # by choice
        self._attributions = dict[int, TokenAttribution]()  # by choice, if `return_tokens` is set
        self._is_single = body.parallel_tool_calls is False

    def of(self, number: int, delta: TextDelta) -> ChatPiece:
        parser = self._parsers.get(number)
        if parser is None:
            parser = self._begin(number)
        attributed, reason, unfinished = self._read(number, parser, delta), delta.finish_reason, {}
        if reason is not None:
            unfinished = parser.unfinished
            if reason == "stop" and parser.num_tool_calls:
                reason = "tool_calls"
        if self._is_single:
            attributed = [(piece, tokens) for piece, tokens in attributed if not piece.index]
        pieces = [piece for piece, _ in attributed]
        tokens = [tokens for _, tokens in attributed] if self._body.return_tokens else None
        num_top, logprobs = self._body.num_logprobs, None
        if num_top is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            places = delta.logprobs or ()
            logprobs = chat_logprobs(places, num_top, self._tokenizer, as_ids=as_ids)
        ids = list(delta.token_ids) if self._body.return_token_ids else None
        return ChatPiece(
            pieces,
            logprobs,
            reason,
            delta.stop_reason,
            ids,
            unfinished,
            tokens,
            delta.weight_versions if ids else (),
        )

    def _begin(self, number: int) -> OutputParser:
        parser = self._parsers[number] = self._make_parser()
        if self._body.return_tokens:
            self._attributions[number] = TokenAttribution(
                parser, self._tokenizer, skip_special_tokens=self._skip_special_tokens
            )
        return parser

    def _read(self, number: int, parser: OutputParser, delta: TextDelta) -> list[AttributedPiece]:
        if self._body.return_tokens:
            return self._attributions[number].read(delta)
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.flush()
        return [(piece, []) for piece in pieces]


@dataclasses.dataclass
class Choice:
    """A complete choice, accumulated from its pieces."""

    pieces: list[Piece] = dataclasses.field(default_factory=list)
    last: ChatPiece = ChatPiece(())
    logprobs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    weight_versions: list[WeightVersionSpan] = dataclasses.field(default_factory=list)

    def add(self, piece: ChatPiece) -> None:
        self.pieces += piece.pieces
        self.logprobs += piece.logprobs or ()
        self.token_ids += piece.token_ids or ()
        self.weight_versions = joined_spans([self.weight_versions, piece.weight_versions])
        self.last = piece

    def as_object(self, number: int) -> dict[str, Any]:
        """Return OpenAI's `choice` object."""
        answer = assemble(self.pieces, self.last.unfinished)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        reasoning = answer.reasoning or None
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}  # clients read either
        if answer.tool_calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": new_id("call_"), "type": "function", "function": call._asdict()}
                for call in answer.tool_calls
            ]
        has_logprobs, has_ids = self.last.logprobs is not None, self.last.token_ids is not None
        choice: dict[str, Any] = {
            "index": number,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if has_logprobs else None,
            "finish_reason": self.last.finish_reason,
            "stop_reason": self.last.stop_reason,
        }
        ids = {"token_ids": self.token_ids, "weight_versions": self.weight_versions}
        return choice | ids if has_ids else choice


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

"""Pieces of a chat: chunks in OpenAI's form, and the choice that they join to."""

import json

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import TextDelta
from jaxspec.server.generation.chat_pieces import ChatPiece, ChatPieces, Choice, first_choice
from jaxspec.server.protocol import ChatCompletionRequest
from jaxspec.text.parsers import PLAIN, OutputParser, Piece
from jaxspec.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(EMBEDDED_MODEL)
BLOCK_COPIES = [
    Piece("reasoning", "hm"),
    Piece("content", "a"),
    Piece("tool_name", "f", 0),
    Piece("tool_arguments", '{"x":', 0),
    Piece("tool_arguments", "1}", 0),
    Piece("tool_name", "g", 1),
    Piece("tool_arguments", "{}", 1),
]


def deltas(piece):
    return [json.loads(data) for data in piece.as_bytes(2)]


def test_each_piece_is_a_chunk_and_the_end_is_the_last():
    *told, end = deltas(ChatPiece(BLOCK_COPIES, finish_reason="tool_calls"))
    assert [choice["index"] for choice in told] == [2] * 7
    assert told[0]["delta"] == {"reasoning_content": "hm", "reasoning": "hm"}
    assert told[1]["delta"] == {"content": "a"}
    (call,) = told[2]["delta"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function" and call["index"] == 0
    assert call["function"] == {"name": "f", "arguments": ""}
    assert told[3]["delta"]["tool_calls"] == [{"index": 0, "function": {"arguments": '{"x":'}}]
    assert told[5]["delta"]["tool_calls"][0]["index"] == 1
    assert end["delta"] == {} and end["finish_reason"] == "tool_calls"
    assert all(choice["finish_reason"] is None for choice in told)
    assert json.loads(first_choice(2))["delta"] == {"role": "assistant", "content": ""}


def test_tokens_are_told_once_with_text_or_without():
    entries = [{"token": "x"}]
    first, second = deltas(ChatPiece(BLOCK_COPIES[:2], entries, token_ids=[5]))
    assert first["logprobs"]["content"] == entries and first["token_ids"] == [5]
    assert second["logprobs"] is None and "token_ids" not in second
    (alone,) = deltas(ChatPiece([], entries))
    assert alone["delta"] == {"content": ""} and alone["logprobs"]["content"] == entries
    assert deltas(ChatPiece([])) == []


def test_the_joined_choice_has_calls_with_whole_arguments():
    choice = Choice()
    choice.add(ChatPiece(BLOCK_COPIES[:3]))
    choice.add(ChatPiece(BLOCK_COPIES[3:], finish_reason="tool_calls"))
    found = choice.as_object(0)
    assert found["message"]["content"] == "a" and found["message"]["reasoning_content"] == "hm"
    calls = [call["function"] for call in found["message"]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"x":1}'}, {"name": "g", "arguments": "{}"}]
    assert found["finish_reason"] == "tool_calls" and found["logprobs"] is None


def read(*texts, reason="stop", dialect=PLAIN, **fields):
    body = ChatCompletionRequest(messages=[], **fields)
    pieces = ChatPieces(body, lambda: dialect(starts_in_reasoning=False), TOKENIZER)
    *others, last = texts
    told = [pieces.of(0, TextDelta(text=text, token_ids=[1])) for text in others]
    return [*told, pieces.of(0, TextDelta(text=last, token_ids=[1], finish_reason=reason))]


def test_choices_are_parsed_apart():
    body = ChatCompletionRequest(messages=[])
    pieces = ChatPieces(body, lambda: OutputParser(starts_in_reasoning=True), TOKENIZER)
    pieces.of(0, TextDelta(text="a</think>", token_ids=[1]))
    found = pieces.of(1, TextDelta(text="b", token_ids=[1]))
    assert [piece.kind for piece in found.pieces] == ["reasoning"]


def test_logprobs_and_ids_come_if_they_are_asked_for():
    (plain,) = read("a")
    assert plain.logprobs is None and plain.token_ids is None
    (found,) = read("a", return_token_ids=True)
    assert found.token_ids == [1]
    body = ChatCompletionRequest(messages=[], logprobs=True)
    pieces = ChatPieces(body, lambda: PLAIN(starts_in_reasoning=False), TOKENIZER)
    delta = TextDelta(text="a", token_ids=[1], logprobs=[{1: Logprob(-1.0, 1)}])
    assert pieces.of(0, delta).logprobs[0]["top_logprobs"] == []


class TwoCalls(OutputParser):
    num_tool_calls = 2

    def push(self, text):
        return BLOCK_COPIES[2:]


def test_one_call_alone_is_told_where_several_are_not_wanted():
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        body = ChatCompletionRequest(messages=[], parallel_tool_calls=parallel)
        pieces = ChatPieces(body, lambda: TwoCalls(starts_in_reasoning=False), TOKENIZER)
        found = pieces.of(0, TextDelta(text="a", token_ids=[1], finish_reason="stop"))
        assert sum(piece.kind == "tool_name" for piece in found.pieces) == count

"""CompletionPieces of a completion: cut in any way they join to the same choice."""

import json
from types import SimpleNamespace

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.generation.completion_pieces import (
    CompletionPiece,
    CompletionPieces,
    is_for_prompt_alone,
    joined,
)
from jaxspec.server.protocol import CompletionRequest
from jaxspec.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(EMBEDDED_MODEL)
PROMPT, TEXT = TOKENIZER.encode("def f"), "(é): 語"
TOKENS = TOKENIZER.encode(TEXT)


def stream(prompt=None):
    """What a delta came from."""
    return SimpleNamespace(prompt_token_ids=PROMPT, prompt_logprobs=prompt)


def delta(tokens, reason=None):
    return TextDelta(
        text=TOKENIZER.decode(tokens),
        token_ids=tokens,
        finish_reason=reason,
        logprobs=[{token: Logprob(-1.0, 1)} for token in tokens],
    )


def pieces(**fields):
    body = CompletionRequest(prompt=PROMPT, **fields)
    asked = fields.get("prompt_logprobs", fields.get("logprobs"))
    params = SamplingParams(n=fields.get("n", 1), prompt_logprobs=asked)
    return CompletionPieces(body, params, TOKENIZER)


def test_joined_pieces_are_the_piece_of_the_whole():
    fields = {"logprobs": 1, "return_token_ids": True, "echo": True}
    prompt = [None, *({token: Logprob(-2.0, 1)} for token in PROMPT[1:])]
    whole = pieces(**fields).of(0, delta(TOKENS, "stop"), stream(prompt))
    maker = pieces(**fields)
    parts = [maker.of(0, delta([token]), stream(prompt)) for token in TOKENS]
    parts.append(maker.of(0, delta([], "stop"), stream(prompt)))
    one = joined(parts)
    assert one.logprobs == whole.logprobs and one.token_ids == TOKENS
    assert (one.finish_reason, one.prompt_token_ids) == ("stop", PROMPT)
    assert whole.text == "def f" + TEXT
    assert len(whole.logprobs["tokens"]) == len(PROMPT) + len(TOKENS)


def test_every_sample_of_a_prompt_is_told_its_logprobs_whichever_comes_first():
    maker = pieces(n=2, echo=True, logprobs=0, prompt_logprobs=1)
    prompt = [None, *({token: Logprob(-2.0, 1)} for token in PROMPT[1:])]
    second = maker.of(1, delta(TOKENS, "stop"), stream(prompt))
    first = maker.of(0, delta(TOKENS, "stop"), stream(prompt))
    assert first.logprobs == second.logprobs
    assert first.prompt_logprobs == second.prompt_logprobs and len(first.prompt_logprobs) == len(
        PROMPT
    )


def test_a_choice_is_json_with_what_was_asked_for():
    told = json.loads(CompletionPiece('a"é', finish_reason="stop", stop_reason=7).as_bytes(3))
    assert told == {
        "index": 3,
        "text": 'a"é',
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": 7,
    }
    assert set(json.loads(CompletionPiece("").as_bytes(0))) == {
        "index",
        "text",
        "logprobs",
        "finish_reason",
    }
    assert CompletionPiece("").is_empty and not CompletionPiece("", finish_reason="stop").is_empty


def test_without_new_tokens_the_prompt_is_told_alone():
    assert is_for_prompt_alone(CompletionRequest(prompt="a", echo=True, max_tokens=0))
    assert not is_for_prompt_alone(CompletionRequest(prompt="a", echo=True, max_tokens=1))
    assert not is_for_prompt_alone(CompletionRequest(prompt="a", max_tokens=0))
    piece = pieces(echo=True, max_tokens=0).of(0, delta(TOKENS, "length"), stream())
    assert piece.text == "def f" and piece.finish_reason == "length"

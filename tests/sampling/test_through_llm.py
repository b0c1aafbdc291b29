"""Masks and penalties from the caller to the text, beside a neighbour without any; and replayed."""

import dataclasses

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.api.inputs import bad_word_ids
from jaxspec.commands.replay import replay
from jaxspec.plan.plan import TABLES

PROMPT = "def add(a, b):"


def has_run(tokens, word):
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens)))


@pytest.mark.soak
def test_what_a_request_forbids_does_not_come_and_its_neighbour_hears_nothing(
    short_model, tmp_path
):
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    llm = LLM(short_model, max_model_len=64, flight_recorder="full", **options)
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def tokens(*params):
        found = llm.generate([PROMPT] * len(params), list(params))
        return [request.outputs[0].token_ids for request in found]

    (free,) = tokens(plain)
    written = [llm.tokenizer.decode([token]) for token in free]
    words = [text for text in written if text.strip()][:2]
    ids = bad_word_ids(words, llm.tokenizer, 10**6)
    assert any(has_run(free, word) for word in ids)
    strict = dataclasses.replace(plain, bad_words=words)
    few = tuple(sorted({*free[:6], 0, 1, 2}))
    allowed = dataclasses.replace(plain, allowed_token_ids=few, stop_token_ids=[*range(100, 200)])
    told, beside = tokens(strict, plain)
    assert not any(has_run(told, word) for word in ids) and beside == free
    assert tokens(allowed, strict) == [tokens(allowed)[0], told]
    assert {*tokens(allowed)[0]} <= {*few}
    path = llm.save_flight(tmp_path / "flight.npz")
    again = replay(path, short_model)
    assert again.is_equal and any(step.program == TABLES for step in again.flight.steps)
    assert llm.metrics()["memory_bytes"]["bias_tables"] > 0
    llm.close()

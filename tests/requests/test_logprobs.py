"""What users read of what a device reported."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.requests.logprobs import (
    LAYOUT,
    Deferred,
    DeferredLogprobs,
    Logprob,
    none,
    readable,
    token_logprobs,
)
from jaxspec.requests.sampling_params import MAX_LOGPROBS


def reported(logits, token):
    """The packed row of one token, from NumPy's own sort."""
    logits = np.asarray(logits, np.float32)
    order = np.argsort(-logits, kind="stable")[:MAX_LOGPROBS]
    row = np.zeros(LAYOUT.size, np.int32)
    fields = LAYOUT.unpack(row)
    fields["logit"][...] = logits[token]
    fields["rank"][...] = 1 + (logits > logits[token]).sum()
    fields["log_total"][...] = np.log(np.exp(logits - logits.max()).sum())
    fields["top_ids"][:] = -1
    fields["top_ids"][: len(order)] = order
    fields["top_logits"][:] = -np.inf
    fields["top_logits"][: len(order)] = logits[order]
    return row


LOGITS = [0.0, 3.0, 1.0, 3.0, -2.0]
EXACT = np.array(LOGITS) - np.log(np.exp(LOGITS).sum())


def ids_and_ranks(entry):
    return [(token, found.rank) for token, found in entry.items()]


def test_the_token_comes_first_and_then_the_likeliest():
    (entry,) = readable([reported(LOGITS, 0)], [0], 3, None)
    assert ids_and_ranks(entry) == [(0, 4), (1, 1), (3, 1), (2, 3)]
    for token, found in entry.items():
        assert abs(found.logprob - EXACT[token]) < 1e-6 and found.decoded_token is None


def test_a_token_among_the_likeliest_is_there_once():
    (entry,) = readable([reported(LOGITS, 3)], [3], 2, None)
    assert ids_and_ranks(entry) == [(3, 1), (1, 1)]


def test_none_of_the_likeliest_may_be_asked_for():
    (entry,) = readable([reported(LOGITS, 4)], [4], 0, None)
    assert ids_and_ranks(entry) == [(4, 5)]


def test_a_small_vocabulary_has_fewer():
    (entry,) = readable([reported(LOGITS, 1)], [1], MAX_LOGPROBS, None)
    assert ids_and_ranks(entry) == [(1, 1), (3, 1), (2, 3), (0, 4), (4, 5)]


def test_every_id_has_its_text():
    (entry,) = readable([reported(LOGITS, 2)], [2], 1, lambda token: f"<{token}>")
    assert [found.decoded_token for found in entry.values()] == ["<2>", "<1>"]


def test_logits_that_round_to_one_logprob_keep_their_ranks():
    """Logprobs of float32 would be equal here, and so would their ranks be."""
    logits = [0.1, np.nextafter(np.float32(0.1), np.float32(1)), 12.0]
    entries = readable([reported(logits, 0), reported(logits, 1)], [0, 1], 3, None)
    for entry in entries:
        assert {token: found.rank for token, found in entry.items()} == {0: 3, 1: 2, 2: 1}


def test_no_tokens_have_no_logprobs():
    assert readable([], [], 3, None) == []
    assert Logprob(-1.0) == (-1.0, None, None)


def test_an_array_has_the_tokens_own_logprobs_alone():
    tokens = [0, 3, 2, 4]
    rows = [reported(LOGITS, token) for token in tokens]
    found, shown = token_logprobs(rows), readable(rows, tokens, 2, None)
    assert found.dtype == np.float32
    own = [entry[token].logprob for token, entry in zip(tokens, shown, strict=True)]
    assert found.tolist() == own
    np.testing.assert_allclose(found, EXACT[tokens], atol=1e-6)
    assert token_logprobs([]).shape == (0,)


@dataclasses.dataclass(frozen=True)
class Output(DeferredLogprobs):
    number: int
    logprobs: list | None = dataclasses.field(default_factory=none)


def deferred(calls):
    def make():
        calls.append(1)
        return [{5: Logprob(-1.0, 1)}]

    return Output(3, Deferred(make, [reported(LOGITS, 2)]))


def test_logprobs_are_made_once_when_they_are_first_read():
    calls = []
    output = deferred(calls)
    assert output.number == 3 and not calls
    assert output.logprobs == [{5: Logprob(-1.0, 1)}] and output.logprobs is output.logprobs
    assert len(calls) == 1
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = output.other


def test_the_array_is_there_before_the_logprobs_and_after_them():
    calls = []
    output = deferred(calls)
    np.testing.assert_allclose(output.token_logprobs, EXACT[[2]], atol=1e-6)
    assert not calls
    assert output.logprobs and output.token_logprobs.tolist() == [-1.0]
    assert Output(3).token_logprobs is None and Output(3, []).token_logprobs.shape == (0,)


def test_a_deferred_output_is_equal_to_one_that_was_not_and_copies_and_pickles_like_it():
    plain = Output(3, [{5: Logprob(-1.0, 1)}])
    copies = copy.copy(deferred([])), copy.deepcopy(deferred([])), dataclasses.replace(deferred([]))
    for output in (deferred([]), *copies, pickle.loads(pickle.dumps(deferred([])))):
        assert output == plain and repr(output) == repr(plain)
        assert dataclasses.asdict(output) == dataclasses.asdict(plain)
    assert Output(3).logprobs is None and pickle.loads(pickle.dumps(Output(3))) == Output(3)


# Through an LLM.

PROMPT = "def fibonacci(n):"
REPORTED = SamplingParams(
    temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=2, prompt_logprobs=1
)
SILENT = dataclasses.replace(REPORTED, logprobs=None, prompt_logprobs=None)


@pytest.fixture(scope="module")
def llm(short_model):
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [16]}
    with LLM(short_model, dtype="float32", max_model_len=64, **options) as llm:
        llm.generate("a", dataclasses.replace(SILENT, max_tokens=1))
        yield llm


@pytest.mark.soak
def test_samples_that_share_a_prompt_show_its_logprobs_once(llm):
    """And the tokens are those of a call that asks for none, with the texts of their ids."""
    params = dataclasses.replace(REPORTED, n=3)  # of which two run at a time
    (output,) = llm.generate(PROMPT, params)
    (silent,) = llm.generate(PROMPT, dataclasses.replace(SILENT, n=3))
    (alone,) = llm.generate(PROMPT, REPORTED)
    assert [s.token_ids for s in output.outputs] == [s.token_ids for s in silent.outputs]
    assert [s.logprobs for s in silent.outputs] == [None] * 3
    first, *entries = output.prompt_logprobs
    assert first is None and len(entries) == len(output.prompt_token_ids) - 1
    for entry, again in zip(entries, alone.prompt_logprobs[1:], strict=True):
        assert entry.keys() == again.keys()
    for sample in output.outputs:
        own = [entry[token] for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert sample.cumulative_logprob == sum(found.logprob for found in own) < 0
        assert sample.token_logprobs.tolist() == [found.logprob for found in own]
        assert [found.decoded_token for found in own] == [
            llm.tokenizer.decode([token]) for token in sample.token_ids
        ]


@pytest.mark.soak
def test_the_pieces_of_a_stream_joined_are_the_output(llm):
    with llm.stream(PROMPT, REPORTED) as stream:
        pieces = list(stream)
    (output,) = llm.generate(PROMPT, REPORTED)
    joined = [entry for piece in pieces for entry in piece.logprobs]
    assert [[*entry] for entry in joined] == [[*entry] for entry in output.outputs[0].logprobs]
    assert len(pieces[0].prompt_logprobs) == len(output.prompt_logprobs)
    assert all(piece.prompt_logprobs is None for piece in pieces[1:])


@pytest.mark.soak
def test_a_stop_string_cuts_them(llm):
    (whole,) = llm.generate(PROMPT, REPORTED)
    stop = whole.outputs[0].text[3:5]
    (output,) = llm.generate(PROMPT, dataclasses.replace(REPORTED, stop=stop))
    (sample,) = output.outputs
    assert sample.finish_reason == "stop"
    assert 0 < len(sample.logprobs) == len(sample.token_ids) < 10
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)

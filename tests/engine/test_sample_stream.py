"""Taps and arrivals: a reader's request becomes what the engine's is, in whatever pieces."""

import numpy as np
import pytest
from callers import Ask, Letters, expected

from jaxspec.engine.sample_stream import SampleStream, receive
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams

ASK = Ask(prompt=2, max_tokens=12)


def make(given, stream_interval=1, **params):
    (request,) = ASK.requests(first_key=0)
    request.params = SamplingParams(max_tokens=12, **params)
    reader = Sample(request, Letters(), None)
    return SampleStream(
        reader, lambda sample_stream, token_delta: given.append(token_delta), stream_interval
    ), reader


@pytest.mark.parametrize("interval", [1, 2, 5, 99])
def test_what_is_handed_on_is_all_and_once(interval):
    random = np.random.default_rng(0)
    for _ in range(50):
        given, received, text = [], 0, ""
        sample_stream, reader = make(given, interval)
        tokens, finish, want = expected(sample_stream.request)
        assert reader.request is not sample_stream.request and reader.request.parent is None
        while sample_stream.request.num_output < len(tokens):
            first = sample_stream.request.num_output
            more = tokens[first : first + int(random.integers(1, 4))]
            sample_stream.request.tokens += more
            sample_stream.request.draft_positions += range(len(more))
            sample_stream.request.finish = (
                finish if first + len(more) == len(tokens) else Finish.RUNNING
            )
            assert sample_stream.read() is None
            if random.random() < 0.5 or sample_stream.request.finish:
                for token_delta in given[received:]:
                    receive(reader.request, token_delta)
                received = len(given)
                reader.read()
                text += delta.text if (delta := reader.take()) else ""
        assert sample_stream.is_over and text == want
        for name in ("tokens", "finish", "draft_positions"):
            assert getattr(reader.request, name) == getattr(sample_stream.request, name)
        sample_stream.end()
        assert len(given) == received  # the end is handed on once


@pytest.mark.parametrize(
    "interval, asked, sizes",
    [
        (1, {}, [2, 2, 2, 2, 2, 1, 1]),
        (2, {}, [2, 2, 2, 2, 2, 2]),
        (3, {}, [2, 4, 4, 2]),
        (99, {}, [2, 10]),
        (3, {"output_kind": RequestOutputKind.CUMULATIVE}, [2, 4, 4, 2]),
        (3, {"output_kind": RequestOutputKind.FINAL_ONLY}, [12]),
        (3, {"stop": "z"}, [2, 2, 2, 2, 2, 1, 1]),
    ],
)
def test_the_first_tokens_and_the_end_come_at_once_and_others_when_they_are_enough(
    interval, asked, sizes
):
    given = []
    sample_stream, _ = make(given, interval, **asked)
    for count in (2, 2, 2, 2, 2, 1, 1):
        sample_stream.request.tokens += [3] * count
        sample_stream.request.finish = (
            Finish.LENGTH if sample_stream.request.num_output == 12 else Finish.RUNNING
        )
        sample_stream.read()
    assert [len(token_delta.tokens) for token_delta in given] == sizes


@pytest.mark.parametrize("interval, sizes", [(1, [1, 1]), (9, [1, 1]), (2, [1, 1])])
def test_what_the_interval_keeps_back_can_be_asked_for_once(interval, sizes):
    given = []
    sample_stream, _ = make(given, interval)
    for _ in range(2):
        sample_stream.request.tokens.append(3)
        sample_stream.read()
    sample_stream.release()
    sample_stream.release()
    assert [len(token_delta.tokens) for token_delta in given] == sizes
    assert not sample_stream.is_over and not any(token_delta.finish for token_delta in given)


def test_a_request_that_was_never_let_in_ends_with_abort():
    given = []
    sample_stream, _ = make(given)
    sample_stream.end()
    assert [token_delta.finish for token_delta in given] == [Finish.ABORT] and sample_stream.is_over


def test_metrics_come_with_what_may_be_the_end_and_nobody_changes_them():
    for stops, is_early in (((), False), (("z",), True)):
        given = []
        sample_stream, _ = make(given, stop=stops)
        sample_stream.request.metrics.record_tokens(1, now=1.0)
        sample_stream.request.tokens.append(3)
        sample_stream.read()
        sample_stream.request.metrics.record_tokens(1, now=2.0)
        sample_stream.request.finish = Finish.LENGTH
        sample_stream.read()
        assert [
            token_delta.metrics and token_delta.metrics.num_tokens for token_delta in given
        ] == [
            1 if is_early else None,
            2,
        ]
        assert sample_stream.is_settled is not is_early


def test_log_probabilities_come_if_they_were_asked_for():
    given = []
    sample_stream, reader = make(given, logprobs=1, prompt_logprobs=0)
    sample_stream.request.tokens.append(3)
    sample_stream.request.logprobs[:] = ["row 0", "of a step that was interrupted"]
    sample_stream.request.prompt_logprobs = [None, "row"]
    sample_stream.read()
    sample_stream.request.tokens.append(4)
    sample_stream.request.logprobs[1:] = ["row 1"]
    sample_stream.read()
    assert [list(token_delta.logprobs) for token_delta in given] == [["row 0"], ["row 1"]]
    assert [token_delta.prompt_logprobs for token_delta in given] == [[None, "row"], None]
    for token_delta in given:
        receive(reader.request, token_delta)
    assert reader.request.logprobs == ["row 0", "row 1"]
    assert reader.request.prompt_logprobs == [None, "row"]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_who_reads_pieces_bounds_the_steps_of_a_dispatch(kind):
    sample_stream, _ = make([], output_kind=kind)
    assert sample_stream.request.is_streamed == (kind is not RequestOutputKind.FINAL_ONLY)
    assert isinstance(sample_stream.request, Request)


@pytest.mark.parametrize(
    "asked, num_given", [({}, 1), ({"stop": "z"}, 3), ({"prompt_logprobs": 0}, 3)]
)
def test_nothing_comes_before_the_end_if_nobody_reads_it(asked, num_given):
    given = []
    sample_stream, reader = make(given, output_kind=RequestOutputKind.FINAL_ONLY, **asked)
    for token, finish in ((3, Finish.RUNNING), (4, Finish.RUNNING), (5, Finish.LENGTH)):
        sample_stream.request.tokens.append(token)
        sample_stream.request.finish = finish
        sample_stream.read()
    assert len(given) == num_given
    for token_delta in given:
        receive(reader.request, token_delta)
    assert reader.request.output == [3, 4, 5] and sample_stream.is_over

"""Taps and arrivals: a reader's request becomes what the engine's is, in whatever pieces."""

import numpy as np
import pytest
from callers import Ask, Letters, expected

from jaxspec import arrivals
from jaxspec.arrivals import Tap
from jaxspec.outputs import Sample
from jaxspec.request import Finish, Request
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

ASK = Ask(prompt=2, max_tokens=12)


def make(given, stream_interval=1, **params):
    (request,) = ASK.requests(first_key=0)
    request.params = SamplingParams(max_tokens=12, **params)
    reader = Sample(request, Letters(), None)
    return Tap(reader, lambda tap, arrival: given.append(arrival), stream_interval), reader


@pytest.mark.parametrize("interval", [1, 2, 5, 99])
def test_what_is_handed_on_is_all_and_once(interval):
    random = np.random.default_rng(0)
    for _ in range(50):
        given, received, text = [], 0, ""
        tap, reader = make(given, interval)
        tokens, finish, want = expected(tap.request)
        assert reader.request is not tap.request and reader.request.leader is None
        while tap.request.num_output < len(tokens):
            first = tap.request.num_output
            more = tokens[first : first + int(random.integers(1, 4))]
            tap.request.tokens += more
            tap.request.draft_positions += range(len(more))
            tap.request.finish = finish if first + len(more) == len(tokens) else Finish.RUNNING
            assert tap.read() is None
            if random.random() < 0.5 or tap.request.finish:
                for arrival in given[received:]:
                    arrivals.receive(reader.request, arrival)
                received = len(given)
                reader.read()
                text += delta.text if (delta := reader.take()) else ""
        assert tap.is_over and text == want
        for name in ("tokens", "finish", "draft_positions"):
            assert getattr(reader.request, name) == getattr(tap.request, name)
        tap.end()
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
    tap, _ = make(given, interval, **asked)
    for count in (2, 2, 2, 2, 2, 1, 1):
        tap.request.tokens += [3] * count
        tap.request.finish = Finish.LENGTH if tap.request.num_output == 12 else Finish.RUNNING
        tap.read()
    assert [len(arrival.tokens) for arrival in given] == sizes


@pytest.mark.parametrize("interval, sizes", [(1, [1, 1]), (9, [1, 1]), (2, [1, 1])])
def test_what_the_interval_keeps_back_can_be_asked_for_once(interval, sizes):
    given = []
    tap, _ = make(given, interval)
    for _ in range(2):
        tap.request.tokens.append(3)
        tap.read()
    tap.release()
    tap.release()
    assert [len(arrival.tokens) for arrival in given] == sizes
    assert not tap.is_over and not any(arrival.finish for arrival in given)


def test_a_request_that_was_never_let_in_ends_with_abort():
    given = []
    tap, _ = make(given)
    tap.end()
    assert [arrival.finish for arrival in given] == [Finish.ABORT] and tap.is_over


def test_metrics_come_with_what_may_be_the_end_and_nobody_changes_them():
    for stops, is_early in (((), False), (("z",), True)):
        given = []
        tap, _ = make(given, stop=stops)
        tap.request.metrics.record_tokens(1, now=1.0)
        tap.request.tokens.append(3)
        tap.read()
        tap.request.metrics.record_tokens(1, now=2.0)
        tap.request.finish = Finish.LENGTH
        tap.read()
        assert [arrival.metrics and arrival.metrics.num_tokens for arrival in given] == [
            1 if is_early else None,
            2,
        ]
        assert tap.is_settled is not is_early


def test_log_probabilities_come_if_they_were_asked_for():
    given = []
    tap, reader = make(given, logprobs=1, prompt_logprobs=0)
    tap.request.tokens.append(3)
    tap.request.logprobs[:] = ["row 0", "of a step that was interrupted"]
    tap.request.prompt_logprobs = [None, "row"]
    tap.read()
    tap.request.tokens.append(4)
    tap.request.logprobs[1:] = ["row 1"]
    tap.read()
    assert [list(arrival.logprobs) for arrival in given] == [["row 0"], ["row 1"]]
    assert [arrival.prompt_logprobs for arrival in given] == [[None, "row"], None]
    for arrival in given:
        arrivals.receive(reader.request, arrival)
    assert reader.request.logprobs == ["row 0", "row 1"]
    assert reader.request.prompt_logprobs == [None, "row"]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_who_reads_pieces_bounds_the_steps_of_a_dispatch(kind):
    tap, _ = make([], output_kind=kind)
    assert tap.request.is_streamed == (kind is not RequestOutputKind.FINAL_ONLY)
    assert isinstance(tap.request, Request)


@pytest.mark.parametrize(
    "asked, num_given", [({}, 1), ({"stop": "z"}, 3), ({"prompt_logprobs": 0}, 3)]
)
def test_nothing_comes_before_the_end_if_nobody_reads_it(asked, num_given):
    given = []
    tap, reader = make(given, output_kind=RequestOutputKind.FINAL_ONLY, **asked)
    for token, finish in ((3, Finish.RUNNING), (4, Finish.RUNNING), (5, Finish.LENGTH)):
        tap.request.tokens.append(token)
        tap.request.finish = finish
        tap.read()
    assert len(given) == num_given
    for arrival in given:
        arrivals.receive(reader.request, arrival)
    assert reader.request.output == [3, 4, 5] and tap.is_over

import random

import numpy as np
import pytest

from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.outputs import CompletionOutput, RequestOutput, Sample, TextDelta
from jaxspec.requests.request import Finish, Request, RequestMetrics
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.requests.stop_strings import StopStrings
from jaxspec.scheduler.scheduler import Scheduler

SIZES = StepShapes(
    max_num_seqs=1,
    max_model_len=200,
    page_size=200,
    num_pages=2,
    num_drafts=0,
    decode_rows=(1,),
    prefill_tokens=(8,),
)


class PairStream:
    """A text stream of tokens that are characters, but "~" shows only with the one after it."""

    def __init__(self):
        self.held = ""

    def push(self, ids):
        text = self.held + "".join(map(chr, ids))
        shown = text.rstrip("~")
        self.held = text[len(shown) :]
        return shown

    text_of = staticmethod(chr)

    def flush(self):
        text, self.held = self.held, ""
        return text


def make_sample(stops=(), stream=True, **fields):
    params = SamplingParams(stop=list(stops), **fields)
    request = Request((1, 2), params, seed=0)
    keeps = params.include_stop_str_in_output
    search = StopStrings(stops, keeps_match=keeps) if stops else None
    return Sample(request, PairStream() if stream else None, search)


def feed(sample, pieces, finish):
    """Give pieces as a session does; what the device decided comes with the last."""
    request, scheduler = sample.request, Scheduler(SIZES, SchedulerLimits())
    scheduler.add([request])
    deltas = []
    for number, piece in enumerate(pieces, 1):
        request.tokens += map(ord, piece)
        request.draft_positions += [*range(1, len(piece)), 0]
        request.metrics.record_tokens(len(piece), now=number)
        if number == len(pieces) and finish:
            scheduler.end(request, finish)
        num_tokens = sample.read()
        if num_tokens is not None:
            scheduler.cut(request, num_tokens)
        deltas.append(sample.take())
        if request.finish:
            assert not scheduler.has_work
            break
    return deltas


def cut_oracle(text, stops, finish=Finish.LENGTH, min_tokens=0, keeps=False):
    """One character at a time: the tokens kept, the text, and the stop string that came.

    The last character stands for a stop id if the end is STOP.
    """
    shown = text[:-1] if finish is Finish.STOP and not keeps else text
    for end in range(min_tokens + 1, len(shown) + 1):
        if found := [stop for stop in stops if shown[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[:end], shown[: end - len(stop) * (not keeps)], stop
    return text, shown, None


def test_tokens_behind_a_stop_string_inside_one_verify_step_are_dropped():
    sample = make_sample(["b"])
    (delta,) = feed(sample, ["abcd"], Finish.RUNNING)
    assert (sample.text, sample.request.output) == ("a", [97, 98])
    assert delta == TextDelta(
        "a", [97, 98], "stop", sample.request.metrics, [1, 2], stop_reason="b"
    )
    assert delta.metrics.num_tokens == 2


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP])
@pytest.mark.parametrize("seed", range(10))
def test_text_tokens_and_reason_do_not_depend_on_how_steps_split_the_tokens(seed, finish, keeps):
    rng = random.Random(seed)
    for _ in range(40):
        text = "".join(rng.choices("abc~", k=rng.randint(1, 14))) + rng.choice(["", "b"])
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
        least = rng.choice([0, 0, 1, 3, 5])
        tokens, shown, stop = cut_oracle(text, stops, finish, least, keeps)
        expected = (shown, list(map(ord, tokens)), "stop" if stop else finish.reason)
        for width in [1, 2, 3, len(text)]:
            pieces = [text[i : i + width] for i in range(0, len(text), width)]
            sample = make_sample(stops, min_tokens=least, include_stop_str_in_output=keeps)
            deltas = feed(sample, pieces, finish)
            output = sample.output()
            assert (output.text, output.token_ids, output.finish_reason) == expected
            assert output.token_ids == sample.request.output, "tokens have one owner"
            assert output.metrics.num_tokens == len(output.token_ids)
            givers = [position for piece in pieces for position in (*range(1, len(piece)), 0)]
            assert output.draft_positions == givers[: len(output.token_ids)]
            assert [j for delta in deltas for j in delta.draft_positions] == output.draft_positions
            assert "".join(delta.text for delta in deltas) == shown
            assert [t for delta in deltas for t in delta.token_ids] == expected[1]
            assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason == expected[2]
            by_id = ord(text[-1]) if finish is Finish.STOP else None
            assert output.stop_reason == deltas[-1].stop_reason == (stop or by_id)


def test_the_model_s_own_end_is_no_stop_reason():
    for finish, own, reason in (
        (Finish.STOP, (), ord("b")),
        (Finish.STOP, (ord("b"),), None),
        (Finish.LENGTH, (), None),
        (Finish.ABORT, (), None),
    ):
        sample = make_sample()
        sample.request.own_eos = own
        feed(sample, ["ab"], finish)
        assert sample.output().stop_reason == reason
        assert sample.text == ("a" if finish is Finish.STOP else "ab")


@pytest.mark.parametrize(
    ("kind", "texts", "ids"),
    [
        (RequestOutputKind.DELTA, ["a", "bc"], [[97], [98, 99]]),
        (RequestOutputKind.CUMULATIVE, ["a", "bc"], [[97], [98, 99]]),
        (RequestOutputKind.FINAL_ONLY, [None, "abc"], [None, [97, 98, 99]]),
    ],
)
def test_a_piece_holds_what_is_new_or_all_at_the_end(kind, texts, ids):
    sample = make_sample(output_kind=kind)
    deltas = feed(sample, ["a", "bc"], Finish.LENGTH)
    assert [delta and delta.text for delta in deltas] == texts
    assert [delta and delta.token_ids for delta in deltas] == ids
    assert [len(d.draft_positions) for d in deltas if d] == [len(own) for own in ids if own]
    assert deltas[-1].finish_reason == "length" and sample.is_taken and sample.take() is None


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (
            RequestOutputKind.CUMULATIVE,
            [({0: "a", 1: ""}, False), ({0: "a", 1: "x"}, False), ({0: "abc", 1: "xy"}, True)],
        ),
        (
            RequestOutputKind.DELTA,
            [({0: "a"}, False), ({1: "x"}, False), ({0: "bc", 1: "y"}, True)],
        ),
        (RequestOutputKind.FINAL_ONLY, [None, None, ({0: "abc", 1: "xy"}, True)]),
    ],
)
def test_an_output_holds_what_its_kind_says_of_all_samples(kind, want):
    samples = [make_sample(output_kind=kind) for _ in range(2)]
    samples[1].index = samples[1].request.index = 1
    found = []
    for new in ({0: "a"}, {1: "x"}, {0: "bc", 1: "y"}):
        deltas = []
        for index, text in new.items():
            finish = Finish.LENGTH if len(new) == 2 else Finish.RUNNING
            deltas += [d for d in feed(samples[index], [text], finish) if d is not None]
        output = RequestOutput.due(samples, deltas)
        found.append(output and ({c.index: c.text for c in output.outputs}, output.finished))
    assert found == want


def test_a_request_is_finished_when_all_of_its_samples_are():
    running, ended = make_sample(), make_sample()
    feed(ended, ["a"], Finish.LENGTH)
    for samples, want in (([ended], True), ([ended, running], False)):
        output = RequestOutput(None, [1], [sample.output() for sample in samples])
        assert output.finished == want and output.num_cached_tokens == 0
        assert output.outputs[0].finished()


def test_text_held_back_comes_out_at_the_end():
    sample = make_sample(["abx"])
    deltas = feed(sample, ["a", "b", "~"], Finish.LENGTH)
    assert [delta.text for delta in deltas] == ["", "", "ab~"]
    assert sample.output().finish_reason == "length"


def test_a_stop_string_that_only_the_end_completes_counts():
    """The text stream gives its last character when it is told that nothing follows."""
    sample = make_sample(["b~"])
    (delta,) = feed(sample, ["ab~"], Finish.LENGTH)
    assert sample.output().text == delta.text == "a"
    assert sample.output().finish_reason == delta.finish_reason == "stop"


def test_without_a_tokenizer_only_ids_grow():
    sample = make_sample(stream=False)
    feed(sample, ["ab", "c"], Finish.LENGTH)
    assert (sample.text, sample.output().token_ids) == ("", [97, 98, 99])


def test_an_output_is_not_changed_by_what_comes_after_it():
    sample = make_sample()
    feed(sample, ["a"], Finish.RUNNING)
    before = sample.output()
    feed(sample, ["b"], Finish.RUNNING)
    assert (before.text, before.token_ids, before.finish_reason) == ("a", [97], None)
    assert before.draft_positions == [0]


def test_deltas_joined_are_the_output_however_often_they_are_taken():
    """Two steps may pass between two of them, or none."""
    sample = make_sample()
    request = sample.request
    assert sample.take() is None
    for token in b"ab":
        request.tokens.append(token)
        request.draft_positions.append(0)
        sample.read()
    assert sample.take() == TextDelta("ab", [97, 98], draft_positions=[0, 0])
    assert sample.take() is None
    request.finish = Finish.ABORT
    assert sample.take() == TextDelta("", [], "abort", request.metrics)
    assert sample.take() is None


def reported(number):
    """A row of which only its number is looked at."""
    row = np.zeros(LAYOUT.size, np.int32)
    LAYOUT.read(row, "rank")[...] = number
    return row


def ranks(logprobs):
    return [[found.rank for found in entry.values()] for entry in logprobs]


def test_logprobs_end_where_the_tokens_do():
    """At a stop string too, and whatever an interrupt or a verify left behind them."""
    sample = make_sample(["b"], logprobs=0)
    sample.request.logprobs = [reported(number) for number in range(5)]
    (delta,) = feed(sample, ["abcd"], Finish.LENGTH)
    output = sample.output()
    assert ranks(output.logprobs) == ranks(delta.logprobs) == [[0], [1]]
    assert [list(entry) for entry in output.logprobs] == [[97], [98]]
    assert output.cumulative_logprob == 0.0 and delta.prompt_logprobs is None


def test_each_delta_has_the_logprobs_of_its_tokens_and_the_first_the_prompt_s():
    sample = make_sample(logprobs=0, prompt_logprobs=0)
    sample.request.logprobs = [reported(number) for number in range(5)]
    sample.request.prompt_logprobs = [None, reported(9)]
    deltas = feed(sample, ["ab", "c"], Finish.LENGTH)
    assert [ranks(delta.logprobs) for delta in deltas] == [[[0], [1]], [[2]]]
    assert [delta.prompt_logprobs is None for delta in deltas] == [False, True]
    assert deltas[0].prompt_logprobs[0] is None and ranks(deltas[0].prompt_logprobs[1:]) == [[9]]


def test_who_did_not_ask_has_none():
    sample = make_sample()
    (delta,) = feed(sample, ["ab"], Finish.LENGTH)
    output = sample.output()
    assert output.logprobs is output.cumulative_logprob is delta.logprobs is None
    assert RequestOutput.of([sample]).prompt_logprobs is None


def test_a_prompt_that_was_not_read_to_its_end_has_no_logprobs():
    sample = make_sample(prompt_logprobs=0)
    assert RequestOutput.of([sample]).prompt_logprobs is None
    sample.request.prompt_logprobs[1] = reported(3)
    assert len(RequestOutput.of([sample]).prompt_logprobs) == 2


def test_metrics_of_a_prompt_are_those_of_its_samples_together():
    parts = []
    for steps in [[([1, 1, 1], [1, 1, 0]), ([1, 1, 1], [1, 0, 0])], [([1, 1], [0, 0])], []]:
        metrics = RequestMetrics(num_tokens=4)
        for step in steps:
            metrics.record(*step)
        parts.append(CompletionOutput(len(parts), "", [], "length", metrics))
    together = RequestOutput(None, [1], parts).metrics
    assert (together.num_drafts, together.num_draft_tokens, together.num_accepted_tokens) == (
        3,
        8,
        3,
    )
    assert together.drafted_per_position == [3, 3, 2]
    assert together.accepted_per_position == [2, 1, 0]
    assert together.num_tokens == 12
    assert together.arrival_time == parts[0].metrics.arrival_time
    assert RequestOutput(None, [1], parts[1:2]).metrics == parts[1].metrics
    assert parts[0].metrics.accepted_per_position == [2, 1, 0], "the parts stay as they are"


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_first_piece_has_the_logprobs_of_the_prompt(kind, monkeypatch):
    sample = make_sample(output_kind=kind)
    monkeypatch.setattr(sample, "prompt_logprobs", lambda: [None])
    first, *others = [delta for delta in feed(sample, ["a", "b", "c"], Finish.LENGTH) if delta]
    assert first.prompt_logprobs == [None]
    assert all(delta.prompt_logprobs is None for delta in others)

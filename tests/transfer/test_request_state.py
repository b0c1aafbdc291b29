"""Requests on their way: what is written is read, and what makes no sense is refused by name."""

import dataclasses
import socket
import threading

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import RequestOutputKind
from jaxspec.transfer import RequestState, receive, send
from jaxspec.transfer.container import Container

PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    logit_bias={3: -1.5, 260: 2.25},
    allowed_token_ids=[1, 2, 3],
    bad_words=["no"],
    seed=-(2**63),
    max_tokens=None,
    stop=["ende", "\u00fc\0"],
    stop_token_ids=[7],
    output_kind=RequestOutputKind.CUMULATIVE,
    logprobs=2,
)
ARRAYS = {"kv": np.arange(24, dtype=np.float32).reshape(3, 8), "conv/x": np.zeros(2, np.float16)}


def request(params=PARAMS, output=(4, 5), name="\ud800 a\0/..", **changes):
    made = Request(
        (1, 2, 3), params.clone(), 2**32 - 1, request_id=name, cache_salt="\udfff", **changes
    )
    made.tokens += output
    made.draft_positions += [0] * len(output)
    if params.logprobs is not None:
        made.logprobs += [np.full(LAYOUT.size, token, np.int32) for token in output]
    return made


def state(**changes):
    return RequestState.of(request(**changes), "f", 2, ARRAYS)


def check_same(got, want):
    for field in dataclasses.fields(RequestState):
        one, other = getattr(got, field.name), getattr(want, field.name)
        if field.name == "arrays":
            assert one.keys() == other.keys()
            for name in one:
                assert one[name].dtype == other[name].dtype
                np.testing.assert_array_equal(one[name], other[name])
        elif field.name == "logprobs" and other is not None:
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other, field.name


STRUCTURED = SamplingParams(
    structured_outputs={"json": {"type": "object", "title": "\u00fc\n"}, "max_whitespace": 3},
    thinking_token_budget=9,
)


@pytest.mark.parametrize(
    "params", [PARAMS, SamplingParams(), STRUCTURED], ids=["many", "none", "structured"]
)
@pytest.mark.parametrize("output", [(), (4, 5)])
def test_what_is_written_is_read(params, output, tmp_path):
    want = state(params=params, output=output, priority=-5)
    check_same(RequestState.from_bytes(want.to_bytes()), want)
    want.save(str(tmp_path / "a"))
    check_same(RequestState.load(tmp_path / "a"), want)
    assert want.num_bytes == 24 * 4 + 4


def test_it_goes_through_a_socket():
    one, other = socket.socketpair()
    with one, other:
        sender = threading.Thread(target=lambda: [send(one, state()) for _ in range(2)])
        sender.start()
        for _ in range(2):
            check_same(receive(other), state())
        sender.join()
        one.close()
        with pytest.raises(ConnectionError):
            receive(other)


@pytest.mark.parametrize("name", ["", " ", "\0", "\ud800", "\U0001f600" * 1000, '"}', "../a"])
def test_ids_and_salts_of_any_text_travel(name):
    sent = dataclasses.replace(state(), request_id=name, cache_salt=name or None)
    got = RequestState.from_bytes(sent.to_bytes())
    assert got.request_id == name and got.cache_salt == (name or None)


def test_it_shares_nothing_with_the_request():
    made = request()
    kept = RequestState.of(made, "f", 3, ARRAYS)
    made.tokens.append(9)
    made.params.temperature = 0.0
    assert kept.token_ids == (4, 5) and kept.params.temperature == 0.7


def changed(**about):
    """The bytes of a state in which a stranger has changed what it says."""
    container = state()._container()
    return dataclasses.replace(container, about={**container.about, **about}).to_bytes()


def with_array(name, array):
    container = state()._container()
    arrays = {key: value for key, value in container.arrays.items() if key != name}
    arrays |= {} if array is None else {name: array}
    return dataclasses.replace(container, arrays=arrays).to_bytes()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fingerprint", 3),
        ("request_id", None),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 1.0),
        ("priority", "1"),
        ("priority", 2**70),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("num_computed", 5),
        ("num_computed", -1),
        ("num_computed", True),
        ("params", None),
        ("params", {}),
    ],
)
def test_a_field_that_lies_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} .*must be"):
        RequestState.from_bytes(changed(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("n", "x"),
        ("logit_bias", [3]),
        ("logit_bias", {"3": 1.0}),
        ("output_kind", "ALL"),
        ("stop", 3),
        ("another", 1),
    ],
)
def test_parameters_are_checked_as_those_of_a_call(name, value):
    about = state()._container().about
    with pytest.raises(ValueError, match="params of a request that travels must be"):
        RequestState.from_bytes(changed(params={**about["params"], name: value}))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("prompt_token_ids", None),
        ("prompt_token_ids", np.zeros(2, np.float32)),
        ("prompt_token_ids", np.zeros((2, 2), np.int32)),
        ("token_ids", np.array([-1, 3], np.int32)),
        ("draft_positions", np.zeros(3, np.int32)),
        ("logprobs", np.zeros((2, 3), np.int32)),
        ("logprobs", None),
    ],
)
def test_an_array_that_lies_is_named(name, array):
    with pytest.raises(ValueError, match=f"^{name} .*must be"):
        RequestState.from_bytes(with_array(name, array))


def test_an_array_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"^arrays .*\['strange'\]"):
        RequestState.from_bytes(with_array("strange", np.zeros(1, np.int32)))


def test_another_container_is_no_request():
    with pytest.raises(ValueError, match="must be of the kind 'request', and is of 'pieces'"):
        RequestState.from_bytes(Container("pieces", {}, {}).to_bytes())

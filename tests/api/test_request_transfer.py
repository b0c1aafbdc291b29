"""The calls by which requests travel: text across the cut, what is refused, two processes."""

import dataclasses
import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from threads import in_threads
from tokenizer_folders import with_bytes
from travellers import by_wire, told

from jaxspec import LLM, RequestOutputKind, SamplingParams, transfer

pytestmark = pytest.mark.soak

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [64],
    "max_model_len": 96,
    "num_pages": 60,
    "page_size": 4,
    "enable_prefix_caching": True,
}
PROMPT = "Bäume €"
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_bytes("qwen3_5", tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def here(folder):
    with LLM(folder, **OPTIONS, state_policy="replay") as llm:
        yield llm


@pytest.fixture(scope="module")
def there(folder):
    options = OPTIONS | {"page_size": 8, "num_pages": 30, "max_in_flight": 0, "max_num_seqs": 2}
    with LLM(folder, **options | {"decode_buckets": [2]}, speculative_config=None) as llm:
        yield llm


def moved(here, there, params, num_tokens, prompt=PROMPT):
    """A request that leaves once so many tokens have been read here: both parts, and its state."""
    pieces, read = here.stream(prompt, params, request_id="moves"), []
    while sum(len(piece.token_ids) for piece in read) < num_tokens:
        read.append(next(pieces))
    if read and read[-1].finish_reason:
        return told(read), told([]), None
    try:
        state = by_wire(here.export_request("moves"))
    except ValueError as error:  # by a step that was in flight
        assert "has just ended" in str(error)
        return told([*read, *pieces]), told([]), None
    first = told([*read, *pieces])
    assert first.finish == "abort"
    return first, told(there.import_request(state)), state


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "seed": None},
        {"skip_special_tokens": False},
        {"detokenize": False},
        {"min_tokens": 15},
        {"logit_bias": {0xC3: 4.0, 0xBC: 4.0, 0xE2: 3.0, 0x82: 3.0, 0xAC: 3.0}},
    ],
    ids=["sampled", "greedy", "special", "ids", "minimum", "parts of letters"],
)
def test_the_text_of_both_parts_is_that_of_one_engine(here, there, changes):
    params = dataclasses.replace(SEEDED, **changes)
    want = here.generate(PROMPT, params)[0].outputs[0]
    for count in range(1, 20, 3):
        first, rest, state = moved(here, there, params, count)
        assert first.tokens + rest.tokens == want.token_ids
        assert first.text + rest.text == want.text
        if state is not None:
            assert rest.finish == want.finish_reason


def test_a_stop_string_is_found_across_the_cut(here, there):
    whole = here.generate(PROMPT, SEEDED)[0].outputs[0].text
    for start in (2, 5, 8):
        params = dataclasses.replace(
            SEEDED, stop=[whole[start : start + 4]], include_stop_str_in_output=start == 5
        )
        want = here.generate(PROMPT, params)[0].outputs[0]
        assert want.finish_reason == "stop"
        for count in range(1, len(want.token_ids) + 1, 2):
            first, rest, state = moved(here, there, params, count)
            assert first.text + rest.text == want.text
            assert (first.tokens + rest.tokens)[: len(want.token_ids)] == want.token_ids
            assert state is None or rest.finish == "stop"


FORMS = {
    "on the device": {"regex": "(?:[a-c]{2}-[0-9]{1,3};){2,9}"},
    "numbers on the device": {
        "json": {"type": "array", "items": {"type": "integer", "minimum": 7}}
    },
    "on the host": {"json_object": True},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_grammar_goes_on_where_it_was(here, there, form):
    params = dataclasses.replace(SEEDED, structured_outputs=form)
    want = here.generate(PROMPT, params)[0].outputs[0]
    assert want.text != here.generate(PROMPT, SEEDED)[0].outputs[0].text
    for count in range(1, len(want.token_ids), 4):
        first, rest, state = moved(here, there, params, count)
        assert first.tokens + rest.tokens == want.token_ids
        assert first.text + rest.text == want.text
        assert state is None or rest.finish == want.finish_reason


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_prompt_with_a_grammar_is_computed_elsewhere(here, there, form):
    params = dataclasses.replace(SEEDED, structured_outputs=form)
    want = here.generate(PROMPT, params)[0].outputs[0]
    got = told(there.import_request(by_wire(here.prefill(PROMPT, params))))
    assert got.tokens == want.token_ids and got.finish == want.finish_reason


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_output_that_a_grammar_refuses_ends_with_an_error(here, there, form):
    state = here.prefill(PROMPT, dataclasses.replace(SEEDED, structured_outputs=form))
    wrong = dataclasses.replace(state, token_ids=(ord("z"),) * 3, draft_positions=(0,) * 3)
    assert told(there.import_request(by_wire(wrong))).finish == "error"


def test_logprobs_go_along(here, there):
    params = dataclasses.replace(SEEDED, logprobs=3, output_kind=RequestOutputKind.FINAL_ONLY)
    want = here.generate(PROMPT, params)[0].outputs[0]
    state = by_wire(_after(here, params, 6))
    got = told(there.import_request(state))
    assert got.tokens == want.token_ids and got.text == want.text  # FINAL_ONLY: all of it
    for ours, others in zip(got.logprobs, want.logprobs, strict=True):
        assert ours.keys() == others.keys()
        for token, entry in ours.items():
            assert entry.logprob == pytest.approx(others[token].logprob, abs=1e-4)
            assert entry.decoded_token == others[token].decoded_token


def _after(llm, params, num_steps, name="moves", prompt=PROMPT):
    """The state of a request that left after so many steps."""
    ((sample,),) = llm.prepare([prompt], [params], [name])
    llm.session.add([sample])
    for _ in range(num_steps):
        llm.session.step()
    return llm.export_request(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"prompt_logprobs": 1},
        {"bad_words": ["ab"]},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=["penalties", "prompt logprobs", "bad words", "full"],
)
def test_whatever_a_request_asks_for_its_tokens_are_the_same(here, there, changes):
    """Those that read no prefixes are computed anew."""
    params = dataclasses.replace(SEEDED, **changes)
    want = here.generate(PROMPT, params)[0].outputs[0]
    state = by_wire(_after(here, params, 7))
    got = told(there.import_request(state))
    assert [*state.token_ids, *got.tokens] == want.token_ids


def test_several_threads_prefill_and_import_at_once(here, there):
    """One engine after the other: see "On a CPU" in docs/migration.md."""
    prompts = [f"{n} {PROMPT}" for n in range(4)]
    want = [here.generate(prompt, SEEDED)[0].outputs[0].token_ids for prompt in prompts]
    states = in_threads(*[lambda p=p: here.prefill(p, SEEDED) for p in prompts])
    here.session.in_turn(here.session.engine.drain)
    arrive = [lambda s=s: told(there.import_request(by_wire(s))).tokens for s in states]
    assert in_threads(*arrive) == want


def test_a_prompt_of_one_token_has_nothing_to_compute(here, there):
    want = here.generate("a", SEEDED)[0].outputs[0].token_ids
    state = by_wire(here.prefill("a", SEEDED))
    assert (state.num_computed, state.arrays) == (0, {})
    assert told(there.import_request(state)).tokens == want


# What is refused.


def test_only_a_request_that_is_there_can_leave(here):
    for name in ("nobody", "", "\ud800", 7):
        with pytest.raises(ValueError, match=r"runs or waits.*has 0 samples here"):
            here.export_request(name)
    here.generate(PROMPT, SEEDED, request_ids=["over"])
    with pytest.raises(ValueError, match="'over' has 0 samples"):
        here.export_request("over")
    params = dataclasses.replace(SEEDED, n=2)
    with here.stream(PROMPT, params, request_id="two") as pieces:
        next(pieces)
        with pytest.raises(ValueError, match="'two' has 2 samples here. Give each sample"):
            here.export_request("two")
        for name in ("same", "same"):
            here.session.add(here.prepare([PROMPT], [SEEDED], [name])[0])
        with pytest.raises(ValueError, match="'same' has 2 samples"):
            here.export_request("same")
        here.abort("same")
        assert next(pieces).finish_reason is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 2}, "one sample, got n=2"),
        ({"prompt_logprobs": 1}, "prompt_logprobs computes its whole prompt"),
        ({"frequency_penalty": 1.0}, "penalties computes its whole prompt"),
    ],
)
def test_a_prefill_that_would_be_in_vain_is_refused(here, changes, words):
    with pytest.raises(ValueError, match=words):
        here.prefill(PROMPT, dataclasses.replace(SEEDED, **changes))
    with pytest.raises(ValueError, match="A prefill is of one prompt, got 2"):
        here.prefill([PROMPT, PROMPT])


def test_an_engine_that_keeps_no_prefixes_computes_what_arrives_and_prefills_nothing(folder, here):
    state = by_wire(_after(here, SEEDED, 6))
    want = here.generate(PROMPT, SEEDED)[0].outputs[0].token_ids
    options = {**OPTIONS, "enable_prefix_caching": False}
    with LLM(folder, **options, speculative_config=None) as llm:
        assert [*state.token_ids, *told(llm.import_request(state)).tokens] == want
        with pytest.raises(ValueError, match="Set enable_prefix_caching=True"):
            llm.prefill(PROMPT, SEEDED)
        again = by_wire(_after(llm, SEEDED, 5))
        assert again.num_computed == 0 and again.arrays == {}
        assert [*again.token_ids, *told(here.import_request(again)).tokens] == want


def wrong(state, **changes):
    return dataclasses.replace(state, **changes)


def with_array(state, name, change):
    return wrong(state, arrays={**state.arrays, name: change(state.arrays[name])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: wrong(s, fingerprint="f" * 64), "Load the same checkpoint in the same dtype"),
        (lambda s: wrong(s, params=dataclasses.replace(s.params, n=2)), "one sample, got n=2"),
        (lambda s: wrong(s, prompt_token_ids=()), "at least one token"),
        (lambda s: wrong(s, prompt_token_ids=(9999,)), "Token ids must be 0 to 263"),
        (lambda s: wrong(s, token_ids=(9999,)), "token_ids has 9999"),
        (lambda s: wrong(s, token_ids=(3,) * 20), "must not have ended"),
        (lambda s: wrong(s, prompt_token_ids=(3,) * 96), "The prompt is too long"),
        (
            lambda s: wrong(
                s, params=dataclasses.replace(s.params, stop_token_ids=[s.token_ids[0]])
            ),
            "a stop id among them",
        ),
        (
            lambda s: with_array(s, "kv", lambda a: a.astype(np.float16)),
            r"'kv' .* must be float32 .* got float16",
        ),
        (lambda s: with_array(s, "kv", lambda a: a[:-1]), "'kv' .* must be"),
        (lambda s: with_array(s, "recurrent/states", lambda a: a[:1]), "'recurrent/states'"),
        (lambda s: with_array(s, "recurrent/conv", lambda a: a[..., :8]), "'recurrent/conv'"),
        (lambda s: s.to_bytes(), "takes a RequestState"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_enters(here, there, change, words):
    state = _after(here, SEEDED, 4)
    with there.stream(PROMPT, SEEDED) as beside:
        first = next(beside)
        figures = there.metrics()["prefix_cache"]
        with pytest.raises(ValueError, match=words):
            there.import_request(change(state))
        assert there.metrics()["prefix_cache"] == figures and len(there.session._samples) == 1
        assert told([first, *beside]).finish == "length"


def test_a_stop_string_in_the_output_so_far_is_refused(here, there):
    state = _after(here, dataclasses.replace(SEEDED, logit_bias={97: 30.0}), 4)
    assert "a" in here.get_tokenizer().decode(list(state.token_ids))
    stopping = dataclasses.replace(state.params, stop=["a"])
    with pytest.raises(ValueError, match="has a stop string"):
        there.import_request(wrong(state, params=stopping))


def test_a_closed_engine_refuses_all_three(folder):
    llm = LLM(folder, **OPTIONS)
    llm.close()
    for call in (lambda: llm.export_request("a"), lambda: llm.prefill("a")):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_stream_that_is_dropped_ends_its_request(here, there):
    state = by_wire(_after(here, SEEDED, 4))
    with there.import_request(state) as pieces:
        next(pieces)
    assert not there.session._samples
    never_read = there.import_request(state)
    never_read.close()
    assert not there.session.has_work


def test_an_abort_during_a_prefill_is_told(here):
    real = here.session.step

    def step():
        here.session.abort("gone")
        return real()

    here.session.step = step
    try:
        with pytest.raises(RuntimeError, match="'gone' ended with 'abort' before"):
            here.prefill(PROMPT, SEEDED, request_id="gone")
    finally:
        here.session.step = real
    assert not here.session.has_work


# Between processes.

CHILD = """
import json, socket, sys
from jaxspec import LLM, SamplingParams, transfer
folder, port, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
params = SamplingParams(temperature=0.9, seed=5, max_tokens=20)
with LLM(folder, **options, show_progress=False, speculative_config=None) as llm:
    state = llm.prefill("B\\u00e4ume \\u20ac", params, request_id="far \\ud800")
with socket.create_connection(("127.0.0.1", port)) as sock:
    transfer.send(sock, state)
    sock.sendall(state.to_bytes()[:10_000])  # and in the middle of another it is gone
"""


def test_prefill_in_another_process(folder, there):
    want = there.generate(PROMPT, SEEDED)[0].outputs[0].token_ids
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(300)
        port = str(server.getsockname()[1])
        arguments = [sys.executable, "-c", CHILD, str(folder), port, json.dumps(OPTIONS)]
        with subprocess.Popen(arguments) as child:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(300)
                state = transfer.receive(sock)
                with pytest.raises(ConnectionError, match="Have the peer send it again"):
                    transfer.receive(sock)
        assert child.returncode == 0
    assert state.request_id == "far \ud800"
    assert told(there.import_request(state)).tokens == want

"""Hidden states in files equal those of the slow, obvious engine; and nothing else is changed."""

import json
import logging
import shutil

import jax
import numpy as np
import pytest
from harness import model, oracle
from safetensors import safe_open
from tokenizer_folders import with_bytes

from jaxspec import LLM, SamplingParams
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers import make_proposer

pytestmark = pytest.mark.soak

METHOD = "extract_hidden_states"
LAYERS = (3, 0, 4)  # 4 is what leaves the last one
OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64]}
OPTIONS |= {"max_model_len": 96, "page_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["def fibonacci(n):", "i", "class Stack:\n    def push(self)", "import os", "0 1 2 3 4 5"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A hybrid with the byte tokenizer."""
    return with_bytes("qwen3_5", tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def plain(checkpoint):
    with LLM(checkpoint, speculative_config=None, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def make(checkpoint, tmp_path):
    """An LLM that saves to `tmp_path`; closed by the test that reads the files."""

    def build(method=(), **options):
        config = {"method": METHOD, "layers": LAYERS, "folder": tmp_path, **dict(method)}
        return LLM(checkpoint, speculative_config=config, **OPTIONS | options)

    return build


def sampled(**fields):
    return SamplingParams(temperature=0.9, **fields)


def states_of(tokens):
    """By one token at a time in NumPy, float64."""
    run, states = oracle("qwen3_5").start(), []
    for token in tokens[:-1]:
        run.feed(token)
        states.append([run.streams[layer] for layer in LAYERS])
    return np.array(states)


def read(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def check(folder, outputs):
    """There is a file of each sample, with its tokens and what the oracle says of them."""
    names = set()
    for request in outputs:
        for sample in request.outputs:
            names.add(name := f"{request.request_id}-{sample.index}.safetensors")
            content, about = read(folder / name)
            tokens = request.prompt_token_ids + sample.token_ids
            assert content["token_ids"].tolist() == tokens
            assert about["prompt_length"] == str(len(request.prompt_token_ids))
            assert about["finish_reason"] == sample.finish_reason
            assert json.loads(about["layers"]) == list(LAYERS)
            want = states_of(tokens)
            assert content["hidden_states"].shape == want.shape
            np.testing.assert_allclose(content["hidden_states"], want, rtol=1e-3, atol=1e-3)
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 1, "state_policy": "replay"},
        {"max_in_flight": 3, "long_prefill_token_threshold": 7, "num_pages": 30},
        {"max_in_flight": 2, "steps_per_dispatch": 3},
        {"max_in_flight": 0, "long_prefill_token_threshold": 1},
        {"max_in_flight": 2, "num_pages": 26},
    ],
    ids=["replay", "chunks and preemption", "several steps", "synchronous", "preemption"],
)
def test_what_is_saved_is_what_the_layers_made(make, plain, tmp_path, options):
    """However prompts are cut, rows preempted and samples forked; and no token is another one."""
    params = [sampled(max_tokens=8 + i, n=1 + i % 3, seed=i) for i in range(8)] + [GREEDY] * 2
    prompts = PROMPTS * 2
    with make(**options) as llm:
        outputs = llm.generate(prompts, params)
        metrics = llm.metrics()
    assert ("num_pages" in options) == (metrics["num_preemptions"] > 0)
    check(tmp_path, outputs)
    wanted = plain.generate(prompts, params)
    for got, want in zip(outputs, wanted, strict=True):
        for one, other in zip(got.outputs, want.outputs, strict=True):
            assert one.token_ids == other.token_ids
    assert all(output.metrics.num_draft_tokens == 0 for output in outputs)


@pytest.mark.devices
def test_devices_that_share_the_model_save_each_state_once(make, tmp_path):
    params = [sampled(max_tokens=8, seed=1), GREEDY]
    with make(tensor_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS[:2], params)
    check(tmp_path, outputs)


def test_a_sample_may_end_while_it_waits_to_come_in_again(make, tmp_path):
    """Its pages were given away when it was preempted, and steps in flight then ended it."""
    ended = 0
    # Without kept prefixes nobody comes back so soon that none ends meanwhile.
    with make(max_in_flight=2, num_pages=25, enable_prefix_caching=False) as llm:
        scheduler = llm.session.scheduler
        end = scheduler.end

        def count(request, finish):
            nonlocal ended
            ended += request in scheduler.waiting
            end(request, finish)

        scheduler.end = count
        params = [sampled(max_tokens=1 + i * 7 % 17, seed=i) for i in range(30)]
        outputs = llm.generate(PROMPTS * 6, params)
    assert ended > 0
    check(tmp_path, outputs)


def test_stop_strings_cut_what_is_saved(make, plain, tmp_path):
    """Also one that the last token completes, when the request has ended already."""
    whole = plain.generate(PROMPTS, GREEDY)
    params = []
    for number, output in enumerate(whole):
        text = output.outputs[0].text
        stop = text[-2:] if number % 2 else text[4:6]
        params.append(SamplingParams(temperature=0.0, max_tokens=12, stop=[stop]))
    with make(max_in_flight=3) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    check(tmp_path, outputs)


def test_only_samples_that_end_by_themselves_are_saved(make, tmp_path):
    with make() as llm:
        with llm.stream(PROMPTS[0], GREEDY) as pieces:
            next(pieces)  # leaving the block aborts it
        outputs = llm.generate(PROMPTS[:2], GREEDY, request_ids=["a/b", "é"])
        assert len(outputs[0].outputs[0].token_ids) == 12
    assert {path.name for path in tmp_path.iterdir()} == {
        "a%2Fb-0.safetensors",
        "%C3%A9-0.safetensors",
    }


def test_requests_are_chosen_by_the_beginning_of_their_id(make, tmp_path):
    with make({"request_id_prefix": "train-"}) as llm:
        names = ["train-1", "2", "train-3", "x-train-4"]
        outputs = llm.generate(PROMPTS[:4], GREEDY, request_ids=names)
    check(tmp_path, [outputs[0], outputs[2]])


def test_streams_and_chats_are_saved_too(make, tmp_path):
    with make() as llm, llm.stream(PROMPTS[0], GREEDY, request_id="s") as pieces:
        tokens = [token for piece in pieces for token in piece.token_ids]
    content, _ = read(tmp_path / "s-0.safetensors")
    assert content["token_ids"].tolist()[-len(tokens) :] == tokens


def test_after_warm_up_nothing_compiles(make):
    heard = []

    def listen(event, duration, **_):
        if "compile" in event or "trace" in event:
            heard.append(event)

    with make(num_pages=26) as llm:
        llm.warm_up(["sampled"])
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            llm.generate(PROMPTS * 2, sampled(max_tokens=20, n=2))
            assert llm.session.scheduler.num_preemptions > 0
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert heard == []


def test_a_folder_that_goes_away_is_told_and_breaks_no_generation(make, plain, tmp_path, caplog):
    with caplog.at_level(logging.ERROR), make({"folder": tmp_path / "states"}) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        while llm.metrics()["hidden_states"]["num_waiting"]:
            pass
        shutil.rmtree(tmp_path / "states")
        outputs = llm.generate(PROMPTS[1:3], GREEDY)
    for got, want in zip(outputs, plain.generate(PROMPTS[1:3], GREEDY), strict=True):
        assert got.outputs[0].text == want.outputs[0].text
    last = caplog.records[-1].getMessage()
    assert "2 of 3 files could not be written: 1-0.safetensors, 2-0.safetensors" in last


def test_its_pool_counts_as_memory(make, plain):
    with make() as llm:
        held = llm.metrics()["memory_bytes"]
        assert held["hidden_states"] == llm.shapes.num_pages * 4 * 3 * 64 * 4
        assert "hidden_states" in llm.memory_map()
    assert "hidden_states" not in plain.metrics()["memory_bytes"]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"layers": [0, 5, 9]}, r"layers must be 0 to 4 with this model, got \[5, 9\].*Leave out"),
        ({"folder": "no/such/parent"}, "in which files can be written, and 'no/such/parent' is"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens must be 0"),
        ({"layer": [1]}, r"Unknown keys \['layer'\]"),
    ],
)
def test_what_cannot_be_saved_is_refused_when_the_llm_is_made(make, method, message):
    with pytest.raises(ValueError, match=message):
        make(method)


def test_it_has_the_sizes_of_its_model():
    config = SpeculativeConfig.of({"method": METHOD, "layers": [2], "folder": "x"})
    assert make_proposer(config, model("qwen3")).taps == (2,)

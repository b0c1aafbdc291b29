"""Laws over keys and values that are stored divided by the checkpoint's scales."""

import dataclasses

import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SCALED, SNAPSHOT, Harness, continuations, model, prompts
from kept_prefixes import ask, keeping, push_out
from travellers import Traveller, by_wire

from jaxspec.parallel import Group

FP8 = np.dtype("float8_e4m3fn")
PROMPT = tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())
PROMPTS = prompts(5, seed=2)
ONE = dataclasses.replace(GREEDY, max_tokens=1)
MTP = {"drafts": 3, "method": "mtp"}


def served(fixture=SCALED, **options):
    """The outputs of all prompts, which arrive while others run, and the accepted drafts."""
    engine = Harness(fixture, kv_dtype=FP8, **options)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, seed)
        engine.step()
    engine.run()
    accepted = sum(each.metrics.num_accepted_tokens for each in engine.requests)
    return [each.output for each in engine.requests], accepted


def alone():
    engine = Harness(SCALED, max_in_flight=0, kv_dtype=FP8)
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, GREEDY, seed)
        engine.run()
    return [each.output for each in engine.requests]


def test_layers_have_the_scales_of_their_own():
    (head,) = model(SCALED).draft_head.layers
    layers = (*model(SCALED).trunk.layers, head)
    scales = [getattr(layer.mixer, "kv_scales", None) for layer in layers]
    found = [np.asarray(each[...]).tolist() for each in scales if each is not None]
    np.testing.assert_allclose(found, [[0.0137, 0.0019], [0.02, 0.3]], rtol=1e-6)


@pytest.mark.soak
def test_speculation_depth_and_chunks_change_no_token():
    plain, known = alone(), [(prompt, GREEDY, seed) for seed, prompt in enumerate(PROMPTS)]
    oracle = {"accuracy": (0.8, 0.5, 0.5), "continuations": continuations(HYBRID, known)}
    for options in (
        {"max_in_flight": 2, "chunk": 1, "vary": True, "drafts": 3, **oracle},
        {"max_in_flight": 0, "chunk": 64, "states": REPLAY, "drafts": 3, **oracle},
    ):
        outputs, accepted = served(**options)
        assert outputs == plain and accepted > 0
    assert served(max_in_flight=3, chunk=7, **MTP)[0] == plain


@pytest.mark.soak
def test_scales_count():
    """The scales of this model waste or exceed the range of 8 bits, so that other ones differ."""
    assert alone() != served(HYBRID, max_in_flight=0)[0]


@pytest.mark.soak
@pytest.mark.parametrize("host_bytes", [0, 2**26])
def test_a_hit_gives_the_tokens_of_a_cold_run(host_bytes):
    sizes = {"num_pages": 120, "num_checkpoints": 40, "host_bytes": host_bytes}
    engine = keeping((PROMPT,), SCALED, kv_dtype=FP8, states=REPLAY, **sizes)
    cold = ask(engine, PROMPT).output
    for length in range(1, len(PROMPT), 3):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        if host_bytes:
            push_out(engine)
        hit = ask(engine, PROMPT)
        assert (hit.num_cached_tokens, hit.output) == (length, cold)


@pytest.mark.soak
def test_a_request_goes_on_elsewhere_with_the_tokens_of_one_engine():
    sender = Traveller(SCALED, kv_dtype=FP8, states=SNAPSHOT, **MTP)
    receiver = Traveller(SCALED, kv_dtype=FP8, states=REPLAY, page_size=8, max_in_flight=0)
    expected = receiver.run(PROMPT, GREEDY).output
    for length in (5, 22):
        state = by_wire(sender.prefill(PROMPT[:length], GREEDY))
        want = receiver.run(PROMPT[:length], GREEDY).output
        assert receiver.finish(state).tokens == want
    assert want == expected


@pytest.mark.soak
def test_engines_with_other_scales_or_none_refuse_a_request():
    sender = Traveller(SCALED, kv_dtype=FP8, **MTP)
    receiver = Traveller(HYBRID, kv_dtype=FP8, **MTP)
    with pytest.raises(ValueError, match="fingerprint"):
        receiver.import_request(by_wire(sender.prefill(PROMPT, GREEDY)))


@pytest.mark.devices
def test_devices_that_share_the_model_give_the_tokens_of_one():
    assert served(group=Group(2), **MTP)[0] == alone()


@pytest.mark.devices
def test_a_request_travels_between_numbers_of_devices():
    sender = Traveller(SCALED, kv_dtype=FP8, group=Group(2), **MTP)
    receiver = Traveller(SCALED, kv_dtype=FP8, page_size=8, **MTP)
    state = by_wire(sender.prefill(PROMPT, GREEDY))
    assert receiver.finish(state).tokens == receiver.run(PROMPT, GREEDY).output

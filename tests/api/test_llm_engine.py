"""LLMEngine: what every face of it shares."""

import threading

import pytest
from harness import FIXTURES
from threads import in_threads

from jaxspec import LLM, SamplingParams
from jaxspec.api.llm_engine import LLMEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture(scope="module")
def engine():
    return LLMEngine(FIXTURES / "qwen3", max_model_len=64, dtype="float32")


def test_an_llm_is_one_whose_callers_step_it():
    assert issubclass(LLM, LLMEngine)


def test_who_needs_nothing_compiled_waits_for_no_turn(engine, monkeypatch):
    monkeypatch.setattr(engine._compiler, "_served", {GREEDY.features})
    is_held, may_go = threading.Event(), threading.Event()

    def hold():
        engine.session.in_turn(lambda: (is_held.set(), may_go.wait(30)))

    def prepare():
        is_held.wait(30)
        (samples,) = engine.prepare([[1, 2, 3]], GREEDY, ["mine"], 4)
        engine.warm_up(GREEDY)
        may_go.set()
        return samples

    _, (sample,) = in_threads(hold, prepare)
    assert (sample.request_id, sample.request.priority) == ("mine", 4)
    assert sample.request.prompt == (1, 2, 3) and not engine.session.has_work


def test_a_closed_one_refuses_all():
    engine = LLMEngine(FIXTURES / "qwen3", max_model_len=64)
    engine.close()
    for call in (
        lambda: engine.prepare([[1]], GREEDY),
        lambda: engine.admit([]),
        engine.warm_up,
    ):
        with pytest.raises(RuntimeError, match="once it is closed"):
            call()

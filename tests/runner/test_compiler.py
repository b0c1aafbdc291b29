"""Compiler: after the first programs no request waits, and later programs change no token."""

import threading

import jax
import pytest
from harness import FIXTURES

from jaxspec import LLM, SamplingParams
from jaxspec.runner import compiler
from jaxspec.runner.warmup import first_programs, later_programs

SIZES = {"max_num_seqs": 3, "decode_buckets": [1, 3], "prefill_buckets": [16]}
PROMPT = {"prompt_token_ids": [5, 6, 7]}
SHORT = {"max_tokens": 6, "ignore_eos": True, "seed": 3}
KINDS = [
    SamplingParams(temperature=0.0, **SHORT),
    SamplingParams(temperature=0.8, top_k=5, **SHORT),
    SamplingParams(temperature=0.9, top_p=0.6, min_p=0.01, **SHORT),
    SamplingParams(temperature=0.0, presence_penalty=1.5, logit_bias={9: 100.0}, **SHORT),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, **SHORT),
    SamplingParams(temperature=0.0, allowed_token_ids=[4, 8], **SHORT),
]


def make():
    options = {**SIZES, "max_model_len": 80, "dtype": "float32", "show_progress": False}
    return LLM(FIXTURES / "qwen3", background_compilation=True, **options)


def ids(llm, params):
    (output,) = llm.generate([PROMPT], params)
    return list(output.outputs[0].token_ids)


@pytest.fixture
def held(monkeypatch):
    """The background compiles nothing until this is set."""
    may_go, compile_batch = threading.Event(), compiler._compile_batch

    def wait(*args):
        may_go.wait(120)
        compile_batch(*args)

    monkeypatch.setattr(compiler, "_compile_batch", wait)
    yield may_go
    may_go.set()


@pytest.fixture
def compiled_here():
    """Names of programs that the calling thread compiles or traces."""
    heard, thread = [], threading.get_ident()

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration") and threading.get_ident() == thread:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield heard
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.soak
def test_no_request_waits_after_the_first_and_later_programs_change_no_token(held, compiled_here):
    with make() as llm:
        ids(llm, KINDS[0])
        compiled_here.clear()
        early = [ids(llm, params) for params in KINDS]
        assert compiled_here == []
        assert set(llm._runner._programs) == set(first_programs(llm.shapes, llm.limits))

        stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True))
        taken = [id for _ in range(3) for id in next(stream).token_ids]
        held.set()  # programs are swapped in while the stream runs
        llm._compiler._background.thread.join(300)
        taken += [id for delta in stream for id in delta.token_ids]
        ready = set(first_programs(llm.shapes, llm.limits)) | set(later_programs(llm.shapes))
        assert ready == set(llm._runner._programs)

        compiled_here.clear()
        alone = [ids(llm, params) for params in KINDS]
        beside = llm.generate([PROMPT] * len(KINDS), KINDS)
        llm.warm_up()
        assert compiled_here == []
        assert early == alone == [list(output.outputs[0].token_ids) for output in beside]
        assert taken[:6] == alone[0] and len(taken) == 70
        assert set(alone[-1]) <= {4, 8} and alone[3][0] == 9


@pytest.mark.soak
def test_a_closed_engine_compiles_no_more(held):
    llm = make()
    ids(llm, KINDS[0])
    thread = llm._compiler._background.thread
    llm.close()
    held.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.soak
def test_a_program_that_can_not_be_compiled_is_left_out(held, monkeypatch):
    with make() as llm:
        expected = ids(llm, KINDS[0])

        def fail(lowered, started):
            raise RuntimeError("no memory")

        monkeypatch.setattr(compiler, "_compiled", fail)
        held.set()
        llm._compiler._background.thread.join(120)
        assert set(llm._runner._programs) == set(first_programs(llm.shapes, llm.limits))
        assert ids(llm, KINDS[0]) == expected

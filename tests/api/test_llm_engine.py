"""LLMEngine: what every face of it shares."""

import pickle
import threading

import pytest
from harness import FIXTURES
from threads import in_threads
from tokenizer_folders import with_bytes

from jaxspec import LLM, EngineArgs, RequestOutputKind, SamplingParams
from jaxspec.api.llm_engine import LLMEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture(scope="module")
def engine():
    return LLMEngine(FIXTURES / "qwen3", max_model_len=64, dtype="float32")


def test_an_llm_is_one_whose_callers_step_it():
    assert issubclass(LLM, LLMEngine)


@pytest.mark.soak
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


@pytest.mark.soak
def test_samples_of_a_regular_grammar_share_an_automaton_that_does_not_travel(tmp_path):
    engine = LLMEngine(with_bytes("qwen3", tmp_path), max_model_len=64, dtype="float32")
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, n=2)
    (samples,) = engine.prepare(["abc</think>"], params)
    one, two = (sample.request for sample in samples)
    assert one.matcher is None and one.automaton is two.automaton
    assert one.automaton.after(engine.tokenizer.encode("yes")) > 0
    assert pickle.loads(pickle.dumps(one)).automaton is None
    engine.close()


@pytest.mark.soak
def test_admitted_samples_have_matchers_of_their_own_that_do_not_travel(tmp_path):
    engine = LLMEngine(with_bytes("qwen3", tmp_path), max_model_len=64, dtype="float32")
    params = SamplingParams(structured_outputs={"grammar": 'start: "yes" | "no"'}, n=2)
    (samples,) = engine.prepare(["abc</think>"], params)
    one, two = (sample.request for sample in samples)
    one.matcher.advance(engine.tokenizer.encode("yes"))
    assert one.matcher.is_accepting and not two.matcher.is_accepting
    there = pickle.loads(pickle.dumps(one))
    assert there.matcher is None and there.grammar == one.grammar
    (plain,) = engine.prepare(["abc"], GREEDY)
    assert plain[0].request.matcher is None
    engine.close()


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


SIZES = {"max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64], "dtype": "float32"}
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, n=2)


@pytest.fixture(scope="module")
def stepped(short_model):
    args = EngineArgs(short_model, background_compilation=False, **SIZES)
    engine = LLM.from_engine_args(args)
    yield engine
    engine.close()


def of_kind(kind):
    params = SAMPLED.clone()
    params.output_kind = kind
    return params


def test_steps_return_what_the_kind_of_each_request_asks_for(stepped):
    (want,) = stepped.generate("def f", SAMPLED)
    texts = {each.index: each.text for each in want.outputs}
    for kind in RequestOutputKind:
        stepped.add_request(kind.name, "def f", of_kind(kind), lora_request=None)
    assert stepped.get_num_unfinished_requests() == 3
    found = {kind.name: [] for kind in RequestOutputKind}
    while stepped.has_unfinished_requests():
        for output in stepped.step():
            found[output.request_id].append(output)
    for name, outputs in found.items():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].prompt_token_ids == want.prompt_token_ids, name
    for name in ("CUMULATIVE", "FINAL_ONLY"):
        assert {each.index: each.text for each in found[name][-1].outputs} == texts
    assert len(found["FINAL_ONLY"]) == 1 < len(found["CUMULATIVE"])
    pieces = [each for output in found["DELTA"] for each in output.outputs]
    for index, text in texts.items():
        assert "".join(each.text for each in pieces if each.index == index) == text
    assert not stepped.session.has_work and stepped.step() == []


def test_an_aborted_request_returns_nothing_more(stepped):
    stepped.add_request("gone", "def f", SAMPLED)
    stepped.add_request("stays", "def f", SAMPLED)
    with pytest.raises(ValueError, match="no other unfinished one has, got 'gone' again"):
        stepped.add_request("gone", "def g")
    stepped.step()
    stepped.abort_request(["gone", "unknown"])
    names = set()
    while stepped.has_unfinished_requests():
        names |= {output.request_id for output in stepped.step()}
    assert names == {"stays"}
    with pytest.raises(TypeError, match="no argument 'arrival'"):
        stepped.add_request("a", "def f", arrival=0)
    assert not stepped.has_unfinished_requests()


def test_queued_prompts_are_completed_when_they_are_waited_for(stepped):
    prompts = ["def f", "import", [5, 6, 7]]
    want = stepped.generate(prompts, SAMPLED)
    names = stepped.enqueue(prompts, SAMPLED)
    assert len(set(names)) == 3 and stepped.llm_engine.has_unfinished_requests()
    found = stepped.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == names
    for output, own in zip(found, want, strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in own.outputs]
    assert stepped.wait_for_completion() == []


def test_arguments_of_vllm_that_ask_for_nothing_are_taken(stepped):
    (want,) = stepped.generate("def f", SAMPLED)
    prompt = {"prompt": "def f", "multi_modal_data": None, "prompt_embeds": None}
    (found,) = stepped.generate(
        prompt, SAMPLED, lora_request=None, tokenization_kwargs={}, use_tqdm=False
    )
    assert found.outputs[0].text == want.outputs[0].text
    with pytest.raises(ValueError, match="lora_request must be None"):
        stepped.generate("def f", SAMPLED, lora_request="mine")
    with pytest.raises(TypeError, match="no argument 'prompt_adapter'"):
        stepped.generate("def f", SAMPLED, prompt_adapter=None)
    with pytest.raises(ValueError, match="'prompt_embeds', which jaxspec does not take"):
        stepped.generate({"prompt_embeds": [[0.5]]}, SAMPLED)
    messages = [{"role": "user", "content": "Hello"}]
    chat = stepped.chat(messages, SAMPLED, chat_template_content_format="string", lora_request=None)
    assert chat[0].outputs[0].text == stepped.chat(messages, SAMPLED)[0].outputs[0].text


def test_a_worker_is_the_engine_itself(stepped):
    assert stepped.collective_rpc("reset_prefix_cache") == [True]
    (metrics,) = stepped.collective_rpc("metrics")
    assert metrics["num_prompt_tokens"] > 0
    for given in (("load_weights",), (print,), ("metrics", 1.0)):
        with pytest.raises(ValueError, match="collective_rpc calls reset_prefix_cache, "):
            stepped.collective_rpc(*given)


def test_a_profile_needs_a_folder(stepped):
    for call in (stepped.start_profile, stepped.stop_profile):
        with pytest.raises(ValueError, match="the option profiler_folder is None"):
            call()

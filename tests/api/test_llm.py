"""What a user calls: generate, stream, chat, metrics, and what bad input gets."""

import dataclasses
import itertools
import json
import os
import re
import signal
import time
import weakref

import pytest
from harness import FIXTURES, HYBRID, folder_of
from threads import in_threads
from tokenizer_folders import with_bytes

import jaxspec
from benchmarks.measure.shapes import ATTENTION, GDN, HIDDEN
from jaxspec import LLM, RequestOutputKind, SamplingParams
from jaxspec.pallas import dispatch

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64]}
PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n    def push(self, item):"]


@pytest.fixture(scope="module")
def embedded():
    """The default model, which drafts well; the tests that do not ask for that take a short one."""
    return LLM(**OPTIONS)


@pytest.fixture(scope="module")
def embedded_plain():
    return LLM(speculative_config=None, **OPTIONS)


@pytest.fixture(scope="module")
def drafted(short_model):
    return LLM(short_model, **OPTIONS)


@pytest.fixture(scope="module")
def plain(short_model):
    return LLM(short_model, speculative_config=None, **OPTIONS)


@pytest.fixture(scope="module")
def bytes_llm(tmp_path_factory):
    """A fixture with the byte tokenizer: random weights, so any text may come."""
    folder = with_bytes(folder_of(HYBRID), tmp_path_factory.mktemp("bytes"))
    return LLM(folder, **OPTIONS, max_model_len=96)


@pytest.mark.soak
def test_the_embedded_model_drafts_well(embedded, embedded_plain):
    outputs = embedded.generate(PROMPTS, GREEDY)
    want = embedded_plain.generate(PROMPTS, GREEDY)
    for output, expected in zip(outputs, want, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        metrics = output.metrics
        assert metrics.num_draft_tokens >= metrics.num_drafts >= 1
        assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
        assert metrics.ttft > 0 and metrics.tpot > 0 and metrics.num_tokens == 24
    total = jaxspec.RequestMetrics.total([output.metrics for output in outputs])
    assert total.mean_acceptance_length > 2.0


@pytest.mark.soak
def test_drafts_after_a_verify_are_those_after_a_prompt_of_the_same_tokens(embedded, monkeypatch):
    """However many of the last drafts stood: the head goes on from the last token that does."""
    monkeypatch.setattr(embedded.session.engine, "max_in_flight", 0)

    def steps(prompt):
        """After each step, what was emitted and what is drafted next."""
        embedded.reset_prefix_cache()  # behind a hit the head knows its last token otherwise
        groups = embedded.prepare([{"prompt_token_ids": prompt}], [GREEDY])
        embedded.session.add(groups[0])
        request, seen = groups[0][0].request, []
        while not request.finish:
            embedded.session.step()
            drafts = embedded._runner.state.rows.drafts[0].tolist()
            if request.output:  # no step of a chunk that does not end the prompt
                seen.append((list(request.output), drafts))
        embedded.session.abort(groups[0])
        return seen

    prompt = embedded.tokenizer.encode(PROMPTS[0])
    _, *after_verifies = steps(prompt)[:6]
    assert len(after_verifies[-1][0]) > 2 * len(after_verifies)  # drafts do stand
    for output, drafts in after_verifies:
        assert steps(prompt + output[:-1])[0] == (output[-1:], drafts)


def check_held_out_prompts(llm):
    """The gate of bundling: at least 2.0 tokens a verify step over held-out prompts."""
    data = json.loads((jaxspec.api.loading.EMBEDDED_MODEL / "held_out_prompts.json").read_text())
    prompts = [{"prompt_token_ids": prompt} for prompt in data["prompts"]]
    params = SamplingParams(temperature=0.0, max_tokens=len(data["greedy"][0]), ignore_eos=True)
    outputs = llm.generate(prompts, params)
    same = [o.outputs[0].token_ids == g for o, g in zip(outputs, data["greedy"], strict=True)]
    assert sum(same) >= len(same) - 1  # one pair of scores among them lies 2e-4 apart
    total = jaxspec.RequestMetrics.total([output.metrics for output in outputs])
    print(f"{total.mean_acceptance_length:.2f} tokens a verify step, {sum(same)}/{len(same)} equal")
    assert total.mean_acceptance_length >= 2.0


@pytest.mark.soak
def test_held_out_prompts_give_the_published_ids_and_acceptance(embedded):
    check_held_out_prompts(embedded)


def check_laws(llm, plain, prompts, monkeypatch, steps=1):
    """Drafts, neighbours, rows, samples and depth of flight change no token, drawn or greedy.

    `test_laws.py` compares with a reference; here `llm`, with `steps` in a dispatch, is compared
    with `plain`, which has no drafts and runs each prompt alone. Every other request draws, each
    with its own seed, and one twice. Returns the parameters and the token ids.
    """
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), max_tokens=72, seed=i, ignore_eos=True, n=2 if i == 3 else 1
        )
        for i in range(len(prompts))
    ]
    want = [ids(plain, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]
    for depth in (0, 1, 3):
        monkeypatch.setattr(llm.session.engine, "max_in_flight", depth)
        with llm.trace() as dispatches:
            assert ids(llm, prompts, params) == want, depth
        whole = [each for each in dispatches if getattr(each.program, "num_steps", 0) == steps]
        early = [after.dispatch_start < d.wait_start for d, after in itertools.pairwise(whole)]
        assert any(early) == (depth > 0)
    return params, want


def ids(llm, prompts, params):
    """The token ids of each sample, by prompt."""
    return [[s.token_ids for s in output.outputs] for output in llm.generate(prompts, params)]


def check_preemption(llm, prompts, params, want):
    """Requests that had to go, and start again in other chunks, get the same tokens."""
    pages, before = llm.session.scheduler.pages, llm.metrics()["num_preemptions"]
    held = pages.allocate(pages.num_free - 14)  # which leaves 2 rows' prompts, not their outputs
    try:
        assert ids(llm, prompts, params) == want
    finally:
        pages.release(held)
    assert llm.metrics()["num_preemptions"] > before


@pytest.fixture(scope="module")
def held_out():
    data = json.loads((jaxspec.api.loading.EMBEDDED_MODEL / "held_out_prompts.json").read_text())
    return [{"prompt_token_ids": p[: 96 - 9 * i]} for i, p in enumerate(data["prompts"][:6])]


@pytest.mark.soak
def test_how_requests_run_changes_no_token(embedded, embedded_plain, held_out, monkeypatch):
    params_and_ids = check_laws(embedded, embedded_plain, held_out, monkeypatch)
    check_preemption(embedded, held_out, *params_and_ids)


RECURRENCES = {"snapshot": "gdn_step", "replay": "gdn_conv_replay"}
SIZES = {"max_num_seqs": 16, "decode_buckets": [16]}


@pytest.mark.gpu
@pytest.mark.parametrize("policy, steps", [("snapshot", 1), ("replay", 1), ("replay", 4)])
def test_on_a_gpu_a_step_runs_kernels_and_keeps_the_laws(policy, steps, held_out, monkeypatch):
    """In float32, where ties are rare: prompts run as XLA, for their kernels take 16 bits."""
    monkeypatch.setattr(dispatch, "_chosen", {})
    options = OPTIONS | SIZES | {"prefill_buckets": [256]}
    llm = LLM(**options, state_policy=policy, steps_per_dispatch=steps)
    check_held_out_prompts(llm)
    plain = LLM(**options, speculative_config=None)
    params_and_ids = check_laws(llm, plain, held_out, monkeypatch, steps)
    check_preemption(llm, held_out, *params_and_ids)
    ran = llm.metrics()["implementations"]
    # Not `gdn_inputs`: this model has too few channels for its kernel.
    for op in ("slot_mapping", "attention_inputs", "paged_attention", RECURRENCES[policy]):
        assert ran[op] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["snapshot", "replay"])
def test_on_a_gpu_all_ops_of_a_published_size_run_their_kernels(policy, tmp_path, monkeypatch):
    """Four layers as Qwen3.5-0.8B has them, in bfloat16 and with random weights, at any depth."""
    gdn, attention, hidden = GDN["qwen3.5-0.8b"], ATTENTION["qwen3.5-0.8b"], HIDDEN["qwen3.5-0.8b"]
    config = json.loads((FIXTURES / "qwen3_5_tied" / "config.json").read_text()) | {
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": 3584,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "linear_num_key_heads": gdn.key_heads,
        "linear_num_value_heads": gdn.value_heads,
        "linear_key_head_dim": gdn.key_dim,
        "linear_value_head_dim": gdn.value_dim,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(dispatch, "_chosen", {})
    options = SIZES | {"prefill_buckets": [1024], "max_model_len": 256, "load_format": "dummy"}
    llm = LLM(tmp_path, dtype="bfloat16", state_policy=policy, **options)
    prompts = [{"prompt_token_ids": list(range(i, 150 - 9 * i))} for i in range(6)]
    want = None
    for depth in (0, 1, 3):
        monkeypatch.setattr(llm.session.engine, "max_in_flight", depth)
        given = ids(llm, prompts, [GREEDY] * len(prompts))
        want = want or given
        assert given == want
    ran = llm.metrics()["implementations"]
    prompts_too = {"slot_mapping", "attention_inputs", "prefill_attention", "gdn_prefill"}
    for op in prompts_too | {"paged_attention", RECURRENCES[policy]}:
        assert ran[op] == ("kernel",)
    # Products of a prompt's tokens, more than 256, are XLA's, and some are kernels of few rows.
    assert {op for op, how in ran.items() if "kernel" not in how} <= {"gated_norm_matmul"}, ran


def test_a_stream_joined_is_what_generate_gives(drafted):
    want = drafted.generate(PROMPTS[2], GREEDY)[0].outputs[0]
    deltas = list(drafted.stream(PROMPTS[2], GREEDY))
    assert "".join(delta.text for delta in deltas) == want.text
    assert [token for delta in deltas for token in delta.token_ids] == want.token_ids
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert deltas[-1].metrics.num_tokens == 24 and len(deltas) > 2


@pytest.mark.soak
def test_a_bound_of_a_step_s_time_holds_from_the_first_step_on_and_changes_no_token(
    drafted, short_model
):
    """Warm-up tells what steps take; none keeps to a nanosecond, so prompts come in the least."""
    options = OPTIONS | {"prefill_buckets": [8, 64]}
    with LLM(short_model, **options, max_step_ms=1e-6) as llm:
        llm.warm_up(["greedy"])
        assert llm.session.scheduler.step_seconds.within_bound(64, 4) == 8
        prompts = [*PROMPTS, PROMPTS[2], PROMPTS[2] * 2]  # four rows: the last one comes later
        params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (24, 4, 4, 4, 4)]
        with llm.trace() as steps:
            outputs = llm.generate(prompts, params)
    beside = {s.num_prompt_tokens for s in steps if s.num_decodes and s.num_prompt_tokens}
    assert beside and max(beside) <= 8
    want = drafted.generate(prompts, params)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in want]


def test_streams_and_batches_share_the_engine(drafted):
    want = drafted.generate(PROMPTS, GREEDY)
    stream = drafted.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    assert drafted.generate(PROMPTS[1:], GREEDY)[1].outputs[0].text == want[2].outputs[0].text
    assert first.text + "".join(delta.text for delta in stream) == want[0].outputs[0].text


@pytest.mark.soak
def test_threads_get_what_one_thread_gets(drafted):
    """Two batches and two streams at once, one stream with a stop string in it."""
    drawn = [SamplingParams(temperature=0.8, max_tokens=40, seed=i) for i in range(3)]
    text = drafted.generate(PROMPTS[2], GREEDY)[0].outputs[0].text
    stopping = dataclasses.replace(GREEDY, stop=[text[12:15]])

    def streamed(prompt, params):
        deltas = list(drafted.stream(prompt, params))
        ids = [token for delta in deltas for token in delta.token_ids]
        return "".join(delta.text for delta in deltas), ids, deltas[-1].finish_reason

    calls = [
        lambda: ids(drafted, PROMPTS, [GREEDY] * 3),
        lambda: ids(drafted, PROMPTS, drawn),
        lambda: streamed(PROMPTS[0], GREEDY),
        lambda: streamed(PROMPTS[2], stopping),
    ]
    want = [call() for call in calls]
    assert want[3][2] == "stop"
    for _ in range(3):
        assert in_threads(*calls) == want
    assert not drafted.session.has_work and len(drafted.session.scheduler._free_slots) == 4


def test_prompts_without_a_seed_draw_noise_of_their_own_in_threads_too(plain):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    texts = in_threads(*[lambda: plain.generate(PROMPTS[0], params)[0].outputs[0].text] * 4)
    assert len(set(texts)) == 4


def test_a_stream_nobody_reads_takes_nothing(drafted):
    drafted.stream(PROMPTS[0], GREEDY)
    assert not drafted.session.scheduler.has_work and not drafted.session._samples


def test_after_a_failed_step_the_llm_starts_afresh(drafted, monkeypatch):
    """What ran ends with an error; the next call finds an empty, working engine."""
    want = drafted.generate(PROMPTS, GREEDY)
    stream = drafted.stream(PROMPTS[0], GREEDY)
    next(stream)

    def fail(plan):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(drafted._runner, "dispatch", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            drafted.generate(PROMPTS, GREEDY)
    assert [delta.finish_reason for delta in stream] == ["error"]
    again = drafted.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in want]
    assert len(drafted.session.scheduler._free_slots) == 4


@pytest.mark.parametrize("shown", [False, None, True])  # None: standard error is no terminal here
def test_progress_shows_only_when_asked_for_and_compiling_unless_it_is_not(
    capfd, short_model, shown
):
    llm = LLM(short_model, **OPTIONS, show_progress=shown)
    llm.generate(PROMPTS, GREEDY)
    bars = capfd.readouterr().err
    if shown is False:
        assert bars == ""
        return
    if shown is None:
        line = r"jaxspec: compiling 8 programs \(greedy\), once \.\.\. done in \d+\.\d s\n"
        assert re.fullmatch(line, bars)
        llm.generate(PROMPTS, GREEDY, use_tqdm=True)
        assert re.search(r"generating: .* 0/3 ", capfd.readouterr().err)
        return
    assert re.search(r"compiling 0/8 .*, 4 rows, 3 drafts, greedy", bars)
    assert re.search(r"compiling 1/8 .*, 4 rows, 3 drafts, 64 prompt tokens, greedy", bars)
    assert re.search(r"compiling 2/8 .*, copies of a prompt's state", bars)
    assert re.search(r"generating: .* 0/3 ", bars)
    assert bars.endswith("\r")  # the last bar is wiped out


def test_the_bar_tells_the_speed_of_a_long_generation(capfd, drafted, monkeypatch):
    monkeypatch.setattr(drafted, "_show_progress", True)
    monkeypatch.setitem(jaxspec.api.progress_bar._LOOKS, "mininterval", 0)
    drafted.generate(PROMPTS, GREEDY)
    assert re.search(r"generating: .* 0/3 .* [1-9]\d* tokens/s", capfd.readouterr().err)


def test_leaving_a_stream_frees_its_row(drafted):
    for _ in drafted.stream(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=900)):
        break
    assert not drafted.session.scheduler.has_work
    assert len(drafted.session.scheduler._free_slots) == 4


LONG = dataclasses.replace(GREEDY, max_tokens=900)


def test_a_stream_that_a_variable_holds_gives_its_row_back_when_it_is_closed(drafted):
    held = drafted.stream(PROMPTS[0], LONG)
    for _ in held:
        break
    assert len(drafted.session.scheduler._free_slots) == 3
    held.close()
    assert len(drafted.session.scheduler._free_slots) == 4
    with drafted.stream(PROMPTS[0], LONG) as pieces:
        for _ in pieces:
            break
    assert len(drafted.session.scheduler._free_slots) == 4 and list(pieces) == []


def test_a_request_has_an_id_by_which_another_thread_ends_it(drafted):
    def aborting():
        while not drafted.session.scheduler.running:
            time.sleep(1e-3)
        drafted.abort("slow")

    pair = dataclasses.replace(LONG, n=2)
    (slow, quick), _ = in_threads(
        lambda: drafted.generate(PROMPTS[:2], [pair, GREEDY], request_ids=["slow", "quick"]),
        aborting,
    )
    assert (slow.request_id, quick.request_id) == ("slow", "quick")
    assert [sample.finish_reason for sample in slow.outputs] == ["abort"] * 2
    assert quick.outputs[0].finish_reason == "length"
    stream = drafted.stream(PROMPTS[0], LONG, request_id="streamed")
    next(stream)
    drafted.abort("streamed")
    assert [piece.finish_reason for piece in stream][-1] == "abort"
    first, second = (output.request_id for output in drafted.generate(PROMPTS[:2], GREEDY))
    assert int(second) == int(first) + 1
    for names in (["a"], "ab", [1, 2]):
        with pytest.raises(ValueError, match="request_ids must be a list of 2 texts"):
            drafted.generate(PROMPTS[:2], GREEDY, request_ids=names)


def test_a_closed_llm_gives_its_memory_back_and_refuses_calls(short_model):
    with LLM(short_model, speculative_config=None, **OPTIONS) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        weights = llm._runner._weights
        state = weakref.ref(llm._runner.state.page_tables)
    assert next(stream).finish_reason == "abort" and list(stream) == []
    assert llm._runner._weights == () and state() is None
    assert not any(weight.is_deleted() for weight in weights)  # others may share them
    for call in (llm.metrics, llm.memory_map, llm.warm_up, llm.trace().__enter__):
        with pytest.raises(RuntimeError, match="once it is closed"):
            call()
    for call in (llm.generate, llm.stream, llm.abort):
        with pytest.raises(RuntimeError, match="once it is closed"):
            call("x")
    llm.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_forked_child_gets_an_error_in_place_of_a_hang(drafted, short_model):
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that hangs ends so
        refused = 0
        for call in (drafted.generate, drafted.chat, jaxspec.generate, lambda _: LLM(short_model)):
            try:
                call("x")
            except RuntimeError as error:
                refused += "threads of JAX do not survive a fork" in str(error)
            except BaseException:
                pass
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


@pytest.mark.soak
def test_an_interrupt_while_programs_warm_up_or_the_state_is_made_harms_no_later_call(
    short_model, monkeypatch
):
    llm = LLM(short_model, speculative_config=None, **OPTIONS)
    run, make = llm._runner._run, llm._runner._new_state

    def interrupt(*args):
        run(*args)
        monkeypatch.setattr(llm._runner, "_run", run)
        monkeypatch.setattr(llm._runner, "_new_state", interrupt_again)
        raise KeyboardInterrupt

    def interrupt_again():
        monkeypatch.setattr(llm._runner, "_new_state", make)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._runner, "_run", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], GREEDY)
    want = jaxspec.generate(PROMPTS[0], short_model, GREEDY, speculative_config=None)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == want.outputs[0].token_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stop_string_ends_the_same_text_with_and_without_drafts(drafted, plain, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3)
    text = plain.generate(PROMPTS[2], params)[0].outputs[0].text
    stop = text[12:15]
    stopping = dataclasses.replace(params, stop=[stop])
    for llm in (plain, drafted):
        output = llm.generate(PROMPTS[2], stopping)[0].outputs[0]
        assert output.text == text[: text.index(stop)] and output.finish_reason == "stop"
        assert llm.tokenizer.decode(output.token_ids).startswith(output.text + stop[:1])
    assert drafted.generate(PROMPTS[2], stopping)[0].outputs[0].token_ids == output.token_ids


def test_samples_differ_and_a_seed_repeats_them(drafted):
    params = SamplingParams(temperature=0.8, max_tokens=16, n=4, seed=11)
    first, second = (drafted.generate(PROMPTS[0], params)[0] for _ in range(2))
    texts = [sample.text for sample in first.outputs]
    assert texts == [sample.text for sample in second.outputs] and len(set(texts)) > 1
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    free = SamplingParams(temperature=0.8, max_tokens=16)
    pair = [drafted.generate(PROMPTS[0], free)[0].outputs[0].text for _ in range(2)]
    assert pair[0] != pair[1]


def test_chat_writes_the_template_and_completes_it(bytes_llm):
    messages = [{"role": "user", "content": "Hi"}]
    params = dataclasses.replace(GREEDY, max_tokens=5)
    (output,) = bytes_llm.chat(messages, params)
    assert output.prompt_token_ids == bytes_llm.tokenizer.chat(messages)
    assert output.prompt == bytes_llm.tokenizer.render_chat(messages)
    assert len(output.outputs[0].token_ids) == 5
    other = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    pair = bytes_llm.chat([messages, other], params, request_ids=["a", "b"])
    assert [each.outputs[0].token_ids for each in pair] == [output.outputs[0].token_ids] * 2
    assert [each.request_id for each in pair] == ["a", "b"]
    pieces = list(bytes_llm.stream_chat(messages, params))
    assert [t for piece in pieces for t in piece.token_ids] == output.outputs[0].token_ids


def test_samples_of_a_prompt_stream_side_by_side(drafted):
    """Each piece names its sample, and the pieces of a sample are what `generate` gives."""
    params = SamplingParams(temperature=0.8, max_tokens=16, n=3, seed=11)
    (want,) = drafted.generate(PROMPTS[0], params)
    for kind in RequestOutputKind:
        pieces = list(drafted.stream(PROMPTS[0], dataclasses.replace(params, output_kind=kind)))
        for sample in want.outputs:
            own = [piece for piece in pieces if piece.index == sample.index]
            assert [piece.finish_reason for piece in own][-1] == "length"
            assert len(own) == 1 or kind is not RequestOutputKind.FINAL_ONLY
            assert "".join(piece.text for piece in own) == sample.text
            assert [t for piece in own for t in piece.token_ids] == sample.token_ids
        assert len(pieces) > 6 or kind is RequestOutputKind.FINAL_ONLY
    with drafted.stream(PROMPTS[0], dataclasses.replace(params, max_tokens=900)) as pieces:
        next(pieces)
        assert len(drafted.session.scheduler._free_slots) < 4
    assert len(drafted.session.scheduler._free_slots) == 4


def test_what_is_changed_after_a_call_began_changes_no_queued_request(drafted):
    params = dataclasses.replace(GREEDY, max_tokens=8)
    want = drafted.generate(PROMPTS[0], params)[0].outputs[0]
    stream = drafted.stream(PROMPTS[0], params)
    params.max_tokens, params.temperature = 3, 1.5
    first = next(stream)
    assert first.text + "".join(piece.text for piece in stream) == want.text
    assert len(drafted.generate(PROMPTS[0], params)[0].outputs[0].token_ids) == 3


def test_a_call_without_parameters_does_as_generation_config_says(short_model, drafted):
    """The embedded model's says greedy; without it the defaults are those of SamplingParams."""
    assert drafted.get_default_sampling_params() == SamplingParams(temperature=0.0)
    outputs = [drafted.generate(PROMPTS[0])[0].outputs[0].token_ids for _ in range(2)]
    assert outputs[0] == outputs[1] and len(outputs[0]) <= 128
    drafted.get_default_sampling_params().max_tokens = 1
    assert drafted.get_default_sampling_params().max_tokens == 128
    with LLM(short_model, **OPTIONS, generation_config="vllm", tensor_parallel_size=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.get_tokenizer() is llm.tokenizer


def test_urgent_requests_enter_first(drafted, monkeypatch):
    """Six requests of one length on four rows, the last two more urgent than the others."""
    entered = []
    enter = drafted.session.scheduler._enter

    def noted(request, *args, **kwargs):
        entered.append(request.priority)
        enter(request, *args, **kwargs)

    monkeypatch.setattr(drafted.session.scheduler, "_enter", noted)
    params = dataclasses.replace(GREEDY, max_tokens=6)
    outputs = drafted.generate([PROMPTS[0]] * 6, params, priority=[3, 3, 2, 3, -1, 2])
    assert entered == sorted(entered) == [-1, 2, 2, 3, 3, 3]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.soak
def test_each_token_says_who_gave_it_and_the_engine_counts_as_its_requests_do(short_model):
    """With stop strings, stop ids, several steps a dispatch and preemption: 4 rows on 13 pages."""
    with LLM(short_model, **OPTIONS, num_pages=14, steps_per_dispatch=2) as llm:
        ends = [{}, {"stop": ["e"]}, {"n": 2}, {"min_tokens": 3}]
        params = [SamplingParams(max_tokens=48, **end) for end in ends]
        outputs = llm.generate([*PROMPTS, "x"], params)
        metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    total = jaxspec.RequestMetrics.total([output.metrics for output in outputs])
    for sample in (sample for output in outputs for sample in output.outputs):
        assert len(sample.draft_positions) == len(sample.token_ids)
        for before, after in itertools.pairwise([0, *sample.draft_positions]):
            assert after in (0, before + 1), "drafts stand in order"
        counts = [sample.draft_positions.count(j) for j in (1, 2, 3)]
        if sample.finish_reason == "length":
            assert counts == sample.metrics.accepted_per_position
    assert set(metrics["acceptance"]) == {"mtp"}
    assert metrics["acceptance"]["mtp"] == {
        "drafted_per_position": total.drafted_per_position,
        "accepted_per_position": total.accepted_per_position,
    }
    assert metrics["num_rounds"] == total.num_drafts > 0
    assert metrics["num_tokens"] >= total.num_tokens  # what a stop string cut was given first


@pytest.mark.soak
def test_replayed_states_give_the_same_tokens_from_less_memory(drafted, plain, short_model):
    """80 tokens: the ring of 32 is folded at least twice."""
    long = dataclasses.replace(GREEDY, max_tokens=80)
    llm = LLM(short_model, state_policy="replay", **OPTIONS)
    for output, expected in zip(
        llm.generate(PROMPTS, long), plain.generate(PROMPTS, long), strict=True
    ):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    snapshots = drafted.metrics()["memory_bytes"]
    small = {"state_dtype": "float16", "kv_dtype": "float8_e4m3fn"}
    half = LLM(short_model, state_policy="replay", **small, **OPTIONS)
    for each, share in ((llm, 0.5), (half, 0.25)):
        memory = each.metrics()["memory_bytes"]
        assert memory["ring"] > 0 and snapshots["ring"] == 0
        assert memory["states"] + memory["ring"] < share * snapshots["states"]
    assert half.metrics()["memory_bytes"]["kv"] == snapshots["kv"] // 4  # of float32


@pytest.mark.soak
def test_drafts_from_part_of_the_vocabulary_stand_and_change_no_text(embedded_plain):
    llm = LLM(speculative_config={"draft_vocab": 1024}, **OPTIONS)
    outputs = llm.generate(PROMPTS, GREEDY)
    for output, expected in zip(outputs, embedded_plain.generate(PROMPTS, GREEDY), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    total = jaxspec.RequestMetrics.total([output.metrics for output in outputs])
    assert total.mean_acceptance_length > 1.5
    # Each id takes a column of the tied head, 160 float32, and the id itself.
    memory = [each.metrics()["memory_bytes"]["proposer_tables"] for each in (llm, embedded_plain)]
    assert memory == [1024 * (160 + 1) * 4, 0]


@pytest.mark.soak
def test_what_a_text_repeats_is_looked_up_and_changes_no_text(embedded_plain):
    functions = "\n\n".join(f"def area_of_{x}(self):\n    return self.{x}" for x in "abcd")
    llm = LLM(speculative_config="ngram", **OPTIONS)
    output, expected = (each.generate(functions, GREEDY) for each in (llm, embedded_plain))
    assert output[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert output[0].metrics.mean_acceptance_length > 1.5
    assert llm.metrics()["memory_bytes"]["tokens"] > 0


@pytest.mark.soak
def test_a_text_that_was_written_before_is_drafted_and_stays_as_it_was(embedded_plain):
    llm = LLM(speculative_config="suffix", **OPTIONS)
    first, again = (llm.generate(PROMPTS, GREEDY) for _ in range(2))
    expected = embedded_plain.generate(PROMPTS, GREEDY)
    for outputs in (first, again):
        for output, plain in zip(outputs, expected, strict=True):
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    metrics = jaxspec.RequestMetrics.total([output.metrics for output in again])
    assert metrics.num_accepted_tokens >= 0.9 * metrics.num_draft_tokens > 0
    assert 64 >= llm.shapes.path_length > 8 and embedded_plain.shapes.path_length == 0


@pytest.mark.soak
def test_drafts_from_a_head_in_8_bits_stand_and_change_no_text(embedded_plain):
    accepted = []
    for dtype in (None, "float8_e4m3fn"):
        llm = LLM(speculative_config={"draft_head_dtype": dtype}, **OPTIONS)
        outputs = llm.generate(PROMPTS, GREEDY)
        for output, expected in zip(outputs, embedded_plain.generate(PROMPTS, GREEDY), strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        total = jaxspec.RequestMetrics.total([output.metrics for output in outputs])
        accepted.append(total.mean_acceptance_length)
    assert accepted[1] > 0.97 * accepted[0]
    # A byte for each weight of the tied head, and a scale.
    assert llm.metrics()["memory_bytes"]["proposer_tables"] == 2048 * 160 + 4


@pytest.mark.soak
def test_synthetic_acceptance_gives_its_rates_whatever_the_target_says():
    rates = [0.8, 0.6, 0.45]
    llm = LLM(
        FIXTURES / "qwen3_5",
        speculative_config={
            "num_speculative_tokens": 3,
            "synthetic_acceptance_rates": rates,
        },
        **OPTIONS,
    )
    params = SamplingParams(temperature=0.0, max_tokens=300)
    metrics = jaxspec.RequestMetrics.total(
        [o.metrics for o in llm.generate([{"prompt_token_ids": [9, t]} for t in range(8)], params)]
    )
    for accepted, rate in zip(metrics.accepted_per_position, rates, strict=True):
        assert abs(accepted / metrics.num_drafts - rate) < 0.06


@pytest.mark.soak
def test_probabilistic_drafts_keep_the_distribution_of_the_second_token():
    """Law 2 through the engine: rejection sampling against plain sampling, by chi-square."""
    options = {
        "dtype": "float32",
        "max_num_seqs": 64,
        "decode_buckets": [64],
        "prefill_buckets": [64],
    }
    probabilistic = {"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    counts = []
    for speculation in (None, probabilistic, probabilistic | {"draft_vocab": 64}):
        llm = LLM(FIXTURES / "qwen3_5", speculative_config=speculation, max_model_len=16, **options)
        params = SamplingParams(temperature=0.6, max_tokens=4, n=1500)
        output = llm.generate({"prompt_token_ids": [7, 1, 9, 200, 5]}, params)[0]
        counts.append([[0] * 264 for _ in range(4)])
        for sample in output.outputs:
            for position, token in enumerate(sample.token_ids):
                counts[-1][position][token] += 1
        assert (output.metrics.num_accepted_tokens > 0) == (speculation is not None)
    for want, *others in zip(*counts, strict=True):
        for got in others:
            pairs = [(a, b) for a, b in zip(want, got, strict=True) if a + b >= 10]
            chi_square = sum((a - b) ** 2 / (a + b) for a, b in pairs)
            assert chi_square < len(pairs) + 4.5 * (2 * len(pairs)) ** 0.5


def changed(**fields):
    """Parameters to which values were assigned that they would refuse."""
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


BAD_CALLS = {  # tests/api/test_messages.py has all messages, and whole
    "an empty prompt": lambda llm: llm.generate(["x", ""]),
    "an unknown id": lambda llm: llm.generate(["x", {"prompt_token_ids": [2048]}]),
    "too long": lambda llm: llm.generate(["x", [1] * 5000]),
    "a key that no prompt has": lambda llm: llm.generate({"prompt": "x", "images": []}),
    "several prompts for a stream": lambda llm: llm.stream(["x", "y"]),
    "a value assigned": lambda llm: llm.generate("x", changed(top_p=2)),
    "no bar": lambda llm: llm.generate("x", use_tqdm="yes"),
    "an image": lambda llm: llm.chat([{"role": "user", "content": [{"type": "image"}]}]),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_harms_nothing_that_runs(drafted, call):
    want = drafted.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stream = drafted.stream(PROMPTS[0], GREEDY)
    text = next(stream).text
    before = len(drafted.session._samples)
    with pytest.raises(ValueError):
        call(drafted)
    assert len(drafted.session._samples) == before
    assert text + "".join(delta.text for delta in stream) == want


def test_without_a_tokenizer_ids_go_in_and_come_out():
    llm = LLM(folder_of(HYBRID), **OPTIONS, max_model_len=96)  # shares bytes_llm's programs
    output = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)[0]
    assert len(output.outputs[0].token_ids) == 24 and output.outputs[0].text == ""
    with pytest.raises(ValueError, match="tokenizer.json"):
        llm.generate("text")
    with pytest.raises(ValueError, match="tokenizer.json"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(stop="x"))

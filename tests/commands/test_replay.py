"""Flights run again: bit for bit, from a copy of the state, after a failure, and with a bug."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from harness import FIXTURES, HYBRID, folder_of

from jaxspec import LLM, SamplingParams, __main__
from jaxspec.commands.replay import replay, report
from jaxspec.flight import file
from jaxspec.models.base import Model
from jaxspec.plan.plan import WRITE, WRITE_STATE, output_layout
from jaxspec.runner import model_runner
from jaxspec.runner.step import new_step

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [64],
    "max_model_len": 96,
}
PROMPTS = [{"prompt_token_ids": [5, 9, seed, 200, 7]} for seed in range(3)]
PARAMS = SamplingParams(temperature=0.8, max_tokens=20, seed=4)


@pytest.fixture(scope="module")
def llm():
    return LLM(folder_of(HYBRID), **OPTIONS)


@pytest.fixture(scope="module")
def path(llm, tmp_path_factory):
    """Forks, sampled and greedy rows, and a stream left midway."""
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=80))
    next(stream)
    llm.generate(PROMPTS, [PARAMS, dataclasses.replace(PARAMS, n=3), dataclasses.replace(PARAMS)])
    stream.close()
    return llm.save_flight(tmp_path_factory.mktemp("flights") / "a.npz")


def changed(path, tmp_path, **changes):
    """A copy of a flight with other fields."""
    new = tmp_path / "changed.npz"
    file.write(new, dataclasses.replace(file.read(path), **changes))
    return new


def test_a_flight_runs_again_bit_for_bit(path):
    result = replay(path)
    assert result.is_equal and result.num_requests == 6
    told = [step for step in result.flight.steps if step.output is not None]  # others copy
    assert result.num_compared == len(told) > 15
    assert f"All {result.num_compared} outputs are equal, bit for bit." in report(result)


@pytest.mark.soak
def test_paths_of_the_host_are_in_the_plans_and_run_again(tmp_path):
    llm = LLM(FIXTURES / "qwen3_5", speculative_config="suffix", **OPTIONS)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 20
    result = replay(llm.save_flight(tmp_path / "suffix.npz"))
    assert result.is_equal and result.num_compared > 5 and result.flight.shapes.path_length > 8


@pytest.mark.soak
def test_what_went_to_the_host_and_came_back_runs_again_or_is_refused(tmp_path):
    """A replay fills its own pieces; one that was filled before the flight began is not there."""
    kept = {"enable_prefix_caching": True, "num_pages": 20, "kv_offloading_size": 0.01}
    with LLM(FIXTURES / "qwen3_5", speculative_config=None, **kept, **OPTIONS) as llm:
        prompts = [{"prompt_token_ids": [seed + 1] * 70} for seed in range(4)]
        params = SamplingParams(temperature=0, max_tokens=4)
        for prompt in 3 * prompts:
            llm.generate(prompt, params)
        assert llm.metrics()["prefix_cache"]["host"]["num_hits"] > 30
        result = replay(llm.save_flight(tmp_path / "whole.npz"))
        assert result.is_equal and result.num_compared > 10
        programs = [step.program for step in result.flight.steps]
        assert WRITE in programs and WRITE_STATE in programs
        llm.restart_flight()
        llm.generate(prompts[0], params)
        with pytest.raises(ValueError, match="restores one from before the flight"):
            replay(llm.save_flight(tmp_path / "part.npz"))
        llm.reset_prefix_cache()
        llm.restart_flight()
        for prompt in 3 * prompts:
            llm.generate(prompt, params)
        assert replay(llm.save_flight(tmp_path / "again.npz")).is_equal


@pytest.mark.soak
def test_a_replay_saves_no_hidden_states(tmp_path):
    """Its program is the same, but a file brings in no folder to write to."""
    folder = tmp_path / "states"
    config = {"method": "extract_hidden_states", "layers": [1, 4], "folder": folder}
    with LLM(FIXTURES / "qwen3_5", speculative_config=config, **OPTIONS) as llm:
        llm.generate(PROMPTS, PARAMS)
        path = llm.save_flight(tmp_path / "a.npz")
    assert len(list(folder.iterdir())) == 3
    shutil.rmtree(folder)
    assert replay(path).is_equal and not folder.exists()


@pytest.mark.soak
def test_a_flight_from_a_copy_of_the_state_goes_on_in_its_midst(llm, tmp_path):
    stream = llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=60))
    next(stream)
    llm.restart_flight()
    assert len(list(stream)) > 3
    llm.generate(PROMPTS, PARAMS)
    saved = llm.save_flight(tmp_path / "copy.npz")
    result = replay(saved)
    assert result.flight.start == "copy" and result.is_equal and result.num_compared > 10
    steps = file.read(saved).steps  # the stream's row is compared, too
    steps[1].output[0, 0, 0] ^= 1
    parting = replay(changed(saved, tmp_path, steps=steps)).parting
    assert parting is not None and (parting.step, parting.row, parting.request) == (1, 0, 0)


def test_the_first_step_and_row_that_part_are_named(path, tmp_path):
    """As if the engine that was recorded had given one row another token."""
    steps = file.read(path).steps
    index = next(
        i
        for i, step in enumerate(steps)
        if step.output is not None and (step.output[:, 2:3, 0] > 0).any()
    )
    steps[index].output[0, 2, 0] ^= 1  # its first token
    result = replay(changed(path, tmp_path, steps=steps))
    parting, (token,) = result.parting, result.token_partings
    assert (parting.step, parting.row, parting.field) == (index, 2, "tokens")
    assert parting.request == token.request and token.recorded == token.replayed ^ 1
    text = report(result)
    assert f"They part first at dispatch {index}, row 2, which is request {token.request}" in text
    assert "5 of 6 requests have equal tokens" in text and not result.is_equal


@pytest.mark.soak
def test_an_engine_with_a_bug_parts_from_the_flight(path, monkeypatch):
    """It scores token 11 too high, as a damaged column of the head would."""
    logits = Model.logits
    biased = lambda *args: logits(*args).at[:, 11].add(np.float32(30.0))  # noqa: E731
    monkeypatch.setattr(Model, "logits", biased)
    monkeypatch.setattr(model_runner, "jitted_step", new_step)
    result = replay(path)
    assert result.parting is not None and result.parting.replayed != result.parting.recorded
    assert any(found.replayed == 11 for found in result.token_partings)


def test_a_failed_step_leaves_a_flight_that_says_how_it_ended(tmp_path, monkeypatch):
    llm = LLM(folder_of(HYBRID), **OPTIONS, flight_folder=tmp_path)
    dispatch, plans = llm._runner.dispatch, []

    def fail_later(plan):
        plans.append(plan)
        if len(plans) == 6:
            raise ValueError("the device is gone")
        return dispatch(plan)

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "dispatch", fail_later)
        with pytest.raises(ValueError, match="the device is gone") as error:
            llm.generate(PROMPTS, PARAMS)
    (path,) = tmp_path.iterdir()
    assert str(path) in error.value.__notes__[0]
    result = replay(path)
    assert len(result.flight.steps) == 6 and result.num_compared == 3  # three were in flight
    text = report(result)
    assert "failed after them with ValueError: the device is gone" in text
    assert "The replay did not fail." in text


def test_a_flight_without_ids_says_what_can_t_be_replayed(tmp_path):
    llm = LLM(folder_of(HYBRID), **OPTIONS, flight_recorder="hashed")
    outputs = llm.generate(PROMPTS, PARAMS)
    result = replay(llm.save_flight(tmp_path / "a.npz"))
    assert result.num_compared == 0 and result.is_equal and result.failure is None
    assert "tokens, drafts and states can't be" in report(result)
    emitted = [
        token
        for step in result.flight.steps
        for token in output_layout(3).read(step.output, "tokens").ravel().tolist()
        if token >= 0
    ]
    true = [token for output in outputs for token in output.outputs[0].token_ids]
    assert len(emitted) >= len(true) and sorted(emitted)[: len(true)] != sorted(true)
    asked = [
        step.packed for step in result.flight.steps if getattr(step.program, "prefill_tokens", 0)
    ]
    prompt = PROMPTS[0]["prompt_token_ids"]
    assert not any(prompt == row[i : i + 5].tolist() for row in asked for i in range(len(row)))


def test_a_recorder_that_is_off_has_no_flight(tmp_path):
    llm = LLM(folder_of(HYBRID), **OPTIONS, flight_recorder="off")
    for call in (lambda: llm.save_flight(tmp_path / "a.npz"), llm.restart_flight):
        with pytest.raises(ValueError, match="flight_recorder='off'"):
            call()


def test_a_recorder_that_can_t_start_anew_disturbs_nobody():
    llm = LLM(folder_of(HYBRID), **OPTIONS, flight_recorder="hashed")
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=9))
    next(stream)
    with pytest.raises(ValueError, match="would show what prompts said"):
        llm.restart_flight()
    assert [piece.finish_reason for piece in stream][-1] == "length"
    llm.close()
    for call in (lambda: llm.save_flight("a.npz"), llm.restart_flight):
        with pytest.raises(RuntimeError, match="once it is closed"):
            call()


@pytest.mark.parametrize(
    "change, why",
    [
        ({"model": "some/model"}, "checkpoint that lies here"),
        ({"model": str(FIXTURES / "qwen3_5_tied")}, "is another one"),
        ({"magic": 1}, "options of this version"),
        ({"page_size": 8}, "plans other shapes than the flight has, in page_size"),
        ({"num_pages": 90}, "plans other shapes than the flight has, in num_pages"),
        ({"dtype": "float64"}, "dtype must be"),
    ],
)
def test_a_flight_of_another_engine_is_refused(path, tmp_path, capsys, change, why):
    about = json.loads(json.dumps(file.read(path).about))
    about["options"] |= change
    new = changed(path, tmp_path, about=about)
    with pytest.raises(ValueError, match=why):
        replay(new)
    assert __main__.main(["replay", str(new)]) == 2 and why in capsys.readouterr().err


def test_a_flight_sets_nothing_that_is_the_machine_s_own(path, tmp_path):
    """A stranger's file may name folders for caches; none is made."""
    about = json.loads(json.dumps(file.read(path).about))
    about["options"] |= {"compilation_cache": str(tmp_path / "evil"), "flight_recorder": "full"}
    assert replay(changed(path, tmp_path, about=about)).is_equal
    assert not (tmp_path / "evil").exists()


def test_a_flight_brings_no_module_in(path, tmp_path, capsys, monkeypatch):
    """Its reader may name one; that of the file is imported neither then nor without."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("evil", "own"):
        (tmp_path / f"{name}_plugin.py").write_text(f"open('{name}', 'w').close()")
    about = json.loads(json.dumps(file.read(path).about))
    about["options"] |= {"model_plugin": "evil_plugin"}
    new = changed(path, tmp_path, about=about)
    with pytest.raises(ValueError, match="model_plugin"):
        replay(new)
    assert __main__.main(["replay", str(new)]) == 2 and "model_plugin" in capsys.readouterr().err
    assert replay(new, model_plugin="own_plugin").is_equal
    assert (tmp_path / "own").exists() and not (tmp_path / "evil").exists()


def test_the_command_says_what_came_of_it(path, tmp_path, capsys):
    assert __main__.main(["replay", str(path)]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    moved = json.loads(json.dumps(file.read(path).about))
    moved["options"]["model"] = "/nowhere"
    new = changed(path, tmp_path, about=moved)
    assert __main__.main(["replay", str(new), "--model", str(folder_of(HYBRID))]) == 0
    assert __main__.main(["replay", str(tmp_path / "none.npz")]) == 2
    assert "A flight must be a file" in capsys.readouterr().err

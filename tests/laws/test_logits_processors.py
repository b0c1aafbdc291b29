"""Logits processors of users: the prefix of each position has its drafts, and rows are their own.

The outputs of `walks` follow from the tokens before them, so each is compared with Python's. Few
pages: requests leave the batch, and enter again with a cached prefix.
"""

import jax.numpy as jnp
import pytest
from harness import FIXTURES
from walks import ALL, SOFT, Walk, walk

from jaxspec import LLM, SamplingParams
from jaxspec.plan.plan import MASKS, PROCESSOR_ARGS, Program
from jaxspec.requests.sampling_features import GREEDY, TOP_K
from jaxspec.runner.warmup import first_programs
from jaxspec.sampling import logits_processors
from jaxspec.sampling.bias_tables import BiasTables
from jaxspec.sampling.processor_tables import ProcessorTables

SIZES = {"max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [16], "max_model_len": 128}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
CROWDED = {"num_pages": 18, "page_size": 8, "steps_per_dispatch": 2, "speculative_config": NGRAM}
SYNCHRONOUS = {"speculative_config": None, "max_in_flight": 0}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(40, 75)), [9], [*range(40, 70), 8, 9]]
WALKS = [(5, 1), (7, 3), (3, 2), (11, 0), (2, 1), (13, 5)]
TOKENS = 40
ON_DEVICE, ON_HOST = Walk().params, ("host_modulus", "host_offset")


def asked(number, names=ON_DEVICE, **fields):
    """The parameters of a walk, or of a free request as every third one is."""
    common = {"max_tokens": TOKENS, "temperature": number % 2, "seed": number, "ignore_eos": True}
    if number % 3 == 2:  # every second one of these has sampling tables
        common |= {"logit_bias": {100: 0.5}} if number % 2 else {}
    else:
        common["extra_args"] = dict(zip(names, WALKS[number % len(WALKS)], strict=True))
    return SamplingParams(**common | fields)


def prompt_of(number):
    return PROMPTS[number % len(PROMPTS)]


def outputs(llm, params):
    """The tokens of each request's samples; the number of a request is its seed."""
    prompts = [{"prompt_token_ids": prompt_of(own.seed)} for own in params]
    return [
        [list(sample.token_ids) for sample in found.outputs]
        for found in llm.generate(prompts, params)
    ]


def assert_walks(found, params):
    for samples, own in zip(found, params, strict=True):
        if own.extra_args is not None:
            expected = walk(prompt_of(own.seed), TOKENS, *own.extra_args.values())
            assert all(tokens == expected for tokens in samples), own


@pytest.fixture(scope="module")
def llm(short_model):
    with LLM(short_model, **SIZES, **CROWDED, logits_processors=ALL) as made:
        made.warm_up()
        yield made


@pytest.fixture(scope="module")
def plain(short_model):
    """Processors without drafts and steps in flight, and with enough pages."""
    with LLM(short_model, **SIZES, **SYNCHRONOUS, logits_processors=ALL) as made:
        yield made


@pytest.fixture(scope="module")
def alone(short_model):
    """The free requests of 12, by an engine without processors."""
    params = [own for own in map(asked, range(12)) if own.extra_args is None]
    with LLM(short_model, **SIZES, **SYNCHRONOUS) as llm:
        return outputs(llm, params)


def check(llm, alone, names=ON_DEVICE):
    """Twice, so that the second time prompts begin on cached prefixes."""
    params = [asked(number, names, n=1 + number % 2) for number in range(12)]
    for _ in range(2):
        found = outputs(llm, params)
        assert_walks(found, params)
        free = [each[:1] for each, own in zip(found, params, strict=True) if own.extra_args is None]
        assert free == alone


@pytest.mark.soak
@pytest.mark.parametrize("names", [ON_DEVICE, ON_HOST], ids=["device", "host"])
def test_outputs_are_what_processors_say_and_neighbours_keep_theirs(llm, alone, names, monkeypatch):
    programs, runner = set(), llm.session.engine.runner
    dispatch = runner.dispatch

    def recorded(plan):
        programs.update(each.program for each in (*plan.before, plan))
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", recorded)
    compiled = set(llm._runner._programs)
    before, acceptance = llm.metrics(), llm.session.engine.acceptance
    num_accepted = acceptance.num_accepted_tokens
    check(llm, alone, names)
    after = llm.metrics()
    assert acceptance.num_accepted_tokens > num_accepted + 100
    assert after["num_preemptions"] > before["num_preemptions"]
    assert after["prefix_cache"]["num_hits"] > before["prefix_cache"]["num_hits"]
    assert PROCESSOR_ARGS in programs and (MASKS in programs) == (names == ON_HOST)
    assert set(llm._runner._programs) == compiled  # a request compiles nothing


@pytest.mark.soak
def test_drafts_and_depth_change_no_token_of_soft_processors(llm, plain):
    late = [asked(n, extra_args={"late": 5 * n}, top_p=0.9) for n in range(1, 7)]
    params = [asked(n, SOFT.params, n=2, repetition_penalty=1.1) for n in range(6)] + late
    found = outputs(llm, params)
    assert found == outputs(plain, params)
    for (tokens,), own in zip(found[6:], late, strict=True):
        count = own.extra_args["late"]
        assert tokens[:count] == [7] * count and tokens[count : count + 1] != [7]


@pytest.mark.soak
def test_a_processor_brings_no_masked_id_back(llm):
    args = {"modulus": 5, "offset": 1, "late": 30}
    params = [
        SamplingParams(max_tokens=8, extra_args={"late": 30}, structured_outputs=form)
        for form in ({"choice": ["yes", "no"]}, {"grammar": 'start: "a" | "b" start "c"'})
    ]
    params += [SamplingParams(max_tokens=8, extra_args={"late": 30}, allowed_token_ids=[3, 4])]
    params += [SamplingParams(max_tokens=8, extra_args=args, allowed_token_ids=[300])]
    one, two, three, four = (each.outputs[0] for each in llm.generate(["a b"] * 4, params))
    assert one.text in ("yes", "no") and set(two.text) <= {*"abc"}
    assert {*three.token_ids} <= {3, 4}
    assert (four.finish_reason, four.token_ids) == ("error", [])  # every id is masked


@pytest.mark.soak
def test_processors_on_the_host_restrict_a_grammar(llm):
    """Token ids of the walk, as a choice of which the grammar leaves one."""
    digits = [llm.tokenizer.encode(str(digit))[0] for digit in range(10)]
    args = {"host_modulus": digits[7] + 1, "host_offset": digits[7] - sum(prompt_of(0)[-2:])}
    form = {"grammar": "start: /[0-9]/"}
    own = SamplingParams(max_tokens=1, extra_args=args, structured_outputs=form)
    (found,) = llm.generate([{"prompt_token_ids": prompt_of(0)}], [own])
    assert found.outputs[0].text == "7"


@pytest.mark.soak
def test_a_failing_processor_ends_its_own_request(llm, caplog):
    params = [asked(0, ON_HOST), asked(1, extra_args={"fails_after": 3})]
    prompts = [{"prompt_token_ids": prompt_of(number)} for number in range(2)]
    one, two = (each.outputs[0] for each in llm.generate(prompts, params))
    assert list(one.token_ids) == walk(prompt_of(0), TOKENS, *WALKS[0])
    assert (two.finish_reason, len(two.token_ids)) == ("error", 3)
    assert "Failing" in caplog.text


@pytest.mark.soak
@pytest.mark.parametrize("features", [GREEDY, TOP_K], ids=str)
def test_rungs_below_the_top_are_those_of_an_engine_without(features, short_model, plain):
    program = Program(4, 0, features)
    with LLM(short_model, **SIZES, **SYNCHRONOUS) as without:
        ours, theirs = (each._runner.lower(program).as_text() for each in (plain, without))
        assert ours == theirs and without._runner.state.tables.processors is None
    assert PROCESSOR_ARGS not in first_programs(without.shapes, without.limits)


@pytest.mark.devices
def test_all_devices_of_a_group_apply_processors_to_whole_logits():
    params = [asked(number, n=2) for number in range(6)]
    sizes = {"tensor_parallel_size": 2, "dtype": "float32", "speculative_config": NGRAM}
    with LLM(FIXTURES / "qwen3_5", **SIZES, **sizes, logits_processors=[Walk()]) as llm:
        assert_walks(outputs(llm, params), params)
        assert llm.session.engine.acceptance.num_accepted_tokens > 50


# Planted bugs

real_newest, real_params = logits_processors.newest_tokens, logits_processors._params_of
real_with_slot, real_bias = ProcessorTables.with_slot, BiasTables.with_slot


def one_place_late(recent, inputs, positions, count):
    return real_newest(recent, inputs, positions - 1, count)


def without_drafts(recent, inputs, positions, count):
    return real_newest(recent, inputs, inputs.num_computed + 1, count)


def of_the_neighbour(tables, inputs):
    return jnp.roll(real_params(tables, inputs), 4, axis=0)


def used_by_all(self, packed, shapes):
    tables = real_with_slot(self, packed, shapes)
    return tables.replace(used=jnp.ones_like(tables.used))


def of_the_former_tenant(self, packed, shapes):
    tables = real_with_slot(self, packed, shapes)
    return tables.replace(used=tables.used | self.used)


def without_the_cached_prefix(self, packed):
    return real_bias(self, packed).replace(recent=self.recent)


BUGS = [
    (logits_processors, "newest_tokens", one_place_late),
    (logits_processors, "newest_tokens", without_drafts),
    (logits_processors, "_params_of", of_the_neighbour),
    (ProcessorTables, "with_slot", used_by_all),
    (ProcessorTables, "with_slot", of_the_former_tenant),
    (BiasTables, "with_slot", without_the_cached_prefix),
]


@pytest.mark.soak
@pytest.mark.parametrize(
    "module, name, bug", BUGS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_bug_is_seen(module, name, bug, short_model, alone, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, name, bug)
    with (
        LLM(short_model, **SIZES, **CROWDED, logits_processors=[Walk()]) as llm,
        pytest.raises(AssertionError),
    ):
        check(llm, alone)

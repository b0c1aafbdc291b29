"""Structured outputs of the whole engine: valid, and the same whoever masks and with what drafts.

An output is valid by `jsonschema`, `re.fullmatch` or membership. It is the same with drafts and
without, at each depth of flight, with masks of the host and with an automaton on the device.
"""

import json
import re
import shutil

import jax.numpy as jnp
import jsonschema
import pytest
from constrained import THINKING
from forms import random_forms

from jaxspec import LLM, SamplingParams
from jaxspec.commands.replay import replay
from jaxspec.engine.engine import Engine
from jaxspec.grammar import Matcher, Matchers, json_schema, regular
from jaxspec.grammar.regular import Regular
from jaxspec.plan import mask_plan
from jaxspec.plan.plan import AUTOMATON, MASKS, ForwardPass
from jaxspec.runner import step as step_module
from jaxspec.runner import tables as runner_tables
from jaxspec.runner import verify as verify_module
from jaxspec.sampling.automata import Automata
from jaxspec.sampling.bias_tables import BiasTables

SIZES = {"max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [16], "max_model_len": 128}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
IN_HALVES = {"background_compilation": False}  # then all programs are compiled before a request
HALF = {ForwardPass(4, 3), ForwardPass(4, 3).rest}
PROMPTS = ["def f(x):", '{"a": [1, 2, 3], "name": "x"', "a = 1\nb = 2\nc = "]


class HostAutomaton:
    """An automaton in place of a `Matcher`, followed on the host."""

    def __init__(self, automaton, budget):
        self.automaton, self.budget, self.tokens = automaton, budget, []

    def advance(self, tokens):
        self.tokens += tokens


def fill_masks(matchers, drafts, masks):
    """As the real one, but also for `HostAutomaton`s."""
    for number, matcher in enumerate(matchers):
        if not isinstance(matcher, HostAutomaton):
            real_fill([matcher], [drafts[number]], masks[number : number + 1])
            continue
        for place in range(1 + len(drafts[number])):
            tokens = [*matcher.tokens, *drafts[number][:place]]
            state = matcher.automaton.position(tokens, matcher.budget).state
            if state >= 0:
                masks[number, place] = matcher.automaton.mask(state)


@pytest.fixture
def on_the_host(monkeypatch):
    """All grammars are followed on the host, as if none were regular."""

    def matcher(self, grammar, output=()):
        automaton = real_automaton(self, grammar)
        if automaton is None:
            return real_matcher(self, grammar, output)
        return HostAutomaton(automaton, grammar.thinking_budget)

    real_automaton, real_matcher = Matchers.automaton, Matchers.matcher

    def follow():
        monkeypatch.setattr(mask_plan, "fill_masks", fill_masks)
        monkeypatch.setattr(Matchers, "matcher", matcher)
        monkeypatch.setattr(Matchers, "automaton", lambda self, grammar, output: None)

    return follow


class Run:
    """An engine's outputs of forms, each of which has a free request beside it."""

    def __init__(self, folder, forms, *, drafts=0, depth=2, temperatures=(0.0, 1.0), **options):
        speculation = {**NGRAM, "num_speculative_tokens": drafts} if drafts else None
        sizes = {**SIZES, "max_in_flight": depth, "speculative_config": speculation}
        llm = LLM(folder, **{**sizes, **options})
        self.forms = forms
        self.params = [
            SamplingParams(
                max_tokens=48,
                temperature=temperatures[number % len(temperatures)],
                seed=number,
                structured_outputs=form,
            )
            for number, form in enumerate(self._with_free_ones())
        ]
        prompts = [PROMPTS[number % 3] for number in range(len(self.params))]
        self.programs = set()
        runner, dispatch = llm.session.engine.runner, llm.session.engine.runner.dispatch

        def recorded(plan):
            self.programs |= {each.program for each in (*plan.before, plan)}
            return dispatch(plan)

        runner.dispatch = recorded
        found = llm.generate(prompts, self.params)
        self.samples = [request.outputs[0] for request in found]
        llm.close()

    def _with_free_ones(self):
        for number, form in enumerate(self.forms):
            yield from [form, None] if number % 4 == 0 else [form]

    @property
    def tokens(self):
        return [tuple(sample.token_ids) for sample in self.samples]

    def check(self):
        """Return the numbers of finished and of unfinished outputs of forms."""
        counts = [0, 0]
        for sample, params in zip(self.samples, self.params, strict=True):
            assert sample.finish_reason in ("stop", "length"), params
            form = params.structured_outputs
            if form is not None:
                is_finished = sample.finish_reason == "stop"
                counts[is_finished] += 1
                check_text(sample.text, form, is_finished)
        return counts[1], counts[0]


def check_text(text, form, is_finished):
    if form.choice is not None:
        assert any(each == text if is_finished else each.startswith(text) for each in form.choice)
    if form.json is not None:
        string = r'"(?:[^"\\]|\\.)*(?:"|$)'  # may have any blanks
        between = re.sub(string, '""', text, flags=re.DOTALL)
        assert not re.search(rf"\s{{{form.max_whitespace + 1}}}", between), "too many blanks"
    if is_finished and form.json is not None:
        jsonschema.validate(json.loads(text), form.json)
    if is_finished and form.regex is not None:
        assert re.fullmatch(form.regex, text, re.ASCII), (form.regex, text)


@pytest.mark.soak
def test_all_ways_give_the_same_valid_outputs(short_model, on_the_host):
    forms = random_forms(24, seed=1)
    device = Run(short_model, forms, drafts=3, depth=2, steps_per_dispatch=2)
    assert {AUTOMATON} <= device.programs
    finished, unfinished = device.check()
    assert finished > unfinished
    on_the_host()
    host = Run(short_model, forms, drafts=0, depth=0)
    host.check()
    assert MASKS in host.programs and AUTOMATON not in host.programs
    assert host.tokens == device.tokens
    halves = Run(short_model, forms, drafts=3, depth=2, **IN_HALVES)
    assert halves.programs >= HALF and not HALF & host.programs
    assert halves.tokens == device.tokens


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_all_ways_give_the_same_valid_outputs_for_many_forms(short_model, on_the_host, part):
    forms = random_forms(125, seed=100 + part)
    device = Run(short_model, forms, drafts=3, depth=2)
    finished, unfinished = device.check()
    assert finished > unfinished
    assert Run(short_model, forms, drafts=0, depth=2).tokens == device.tokens
    on_the_host()
    for drafts, depth in ((3, 2), (3, 0), (0, 2)):
        run = Run(short_model, forms, drafts=drafts, depth=depth)
        assert run.tokens == device.tokens
        run.check()


@pytest.mark.soak
def test_free_neighbours_keep_their_tokens(short_model):
    forms = [*random_forms(4, seed=2), {"json_object": True}, {"grammar": 'start: "a" "b"*'}]
    beside = Run(short_model, forms, drafts=3)
    assert {AUTOMATON, MASKS} <= beside.programs
    beside.check()
    is_free = [params.structured_outputs is None for params in beside.params]
    llm = LLM(short_model, **SIZES, speculative_config=NGRAM)
    prompts = [PROMPTS[n % 3] for n, free in enumerate(is_free) if free]
    alone = llm.generate(prompts, [params for params in beside.params if not params.has_grammar])
    llm.close()
    assert [tuple(each.outputs[0].token_ids) for each in alone] == [
        tokens for tokens, free in zip(beside.tokens, is_free, strict=True) if free
    ]


@pytest.fixture(scope="module")
def thinking_model(short_model, tmp_path_factory):
    """A model with `<think>` and `</think>` in place of its last two tokens."""
    folder = tmp_path_factory.mktemp("models") / "thinking"
    shutil.copytree(short_model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, names = tokenizer["model"]["vocab"], {"<think>": 2046, "</think>": 2047}
    gone = {text for text, token in vocab.items() if token in names.values()}
    kept = {text: token for text, token in vocab.items() if text not in gone}
    tokenizer["model"]["vocab"] = kept | names
    merges = [
        each if isinstance(each, list) else each.split(" ") for each in tokenizer["model"]["merges"]
    ]
    tokenizer["model"]["merges"] = [each for each in merges if not {*each, "".join(each)} & gone]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [
        {"id": token, "content": name} | flags for name, token in names.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    return folder


def thoughts(folder, **options):
    """Outputs after prompts that open the reasoning or not, with limits; no form is of the host."""
    llm = LLM(folder, **SIZES, **options)
    params = [
        SamplingParams(
            max_tokens=24,
            temperature=1.0,
            seed=number,
            thinking_token_budget=budget,
            structured_outputs=None if number % 6 > 3 else {"choice": ["yes", "no"]},
            logit_bias={2046: 30.0} if number % 2 and number < 6 else None,
        )
        for number, budget in enumerate([0, 1, 2, 3, 5, 6, 7, None, 0, 4, 9, 11])
    ]
    prompts = ["<|user|>Q" + ("" if number % 2 else "<think>") for number in range(len(params))]
    found = [request.outputs[0] for request in llm.generate(prompts, params)]
    llm.close()
    return params, found


@pytest.mark.soak
def test_limits_of_reasoning_are_exact_wherever_they_are_followed(thinking_model, on_the_host):
    params, outputs = thoughts(
        thinking_model, speculative_config=NGRAM, steps_per_dispatch=2, max_in_flight=2
    )
    num_thoughts = 0
    for number, (param, output) in enumerate(zip(params, outputs, strict=True)):
        tokens, budget = list(output.token_ids), param.thinking_token_budget
        if number % 2 == 0 or tokens[0] == 2046:
            length = tokens.index(2047) - number % 2
            assert length == budget  # the model itself never ends it
            num_thoughts += 1
        if param.structured_outputs is not None:
            assert output.finish_reason == "stop" and output.text.rstrip().endswith(("yes", "no"))
    assert num_thoughts > 7
    want = [each.token_ids for each in outputs]
    _, plain = thoughts(thinking_model, max_in_flight=0)
    on_the_host()
    _, of_host = thoughts(thinking_model, speculative_config=NGRAM)
    for found in (plain, of_host):
        assert [each.token_ids for each in found] == want


@pytest.mark.devices
def test_devices_that_share_a_model_give_the_tokens_of_one(short_model):
    """Those of forms on the device, of forms on the host, and of free rows beside them."""
    forms = [*random_forms(6, seed=5), {"json_object": True}, {"grammar": 'start: "a" "b"*'}]
    options = {"drafts": 3, "dtype": "float32"}
    options |= IN_HALVES
    one, two = (Run(short_model, forms, **options, tensor_parallel_size=n) for n in (1, 2))
    assert one.programs & two.programs >= {AUTOMATON, MASKS, *HALF}
    assert two.tokens == one.tokens
    two.check()


@pytest.mark.soak
def test_samples_of_one_prompt_and_preempted_requests_follow_their_grammars(short_model):
    """Few pages: requests leave the batch, and enter again behind others."""
    forms = [{"regex": "(?:ab|cd){12,}"}, {"json": {"type": "array", "items": {}}}]
    llm = LLM(short_model, **SIZES, num_pages=14, page_size=8, speculative_config=NGRAM)
    params = [
        SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=7, structured_outputs=form)
        for form in forms
    ]
    crowded = llm.generate(PROMPTS[:2], params)
    assert llm.metrics()["num_preemptions"] > 0
    llm.close()
    llm = LLM(short_model, **SIZES)
    roomy = llm.generate(PROMPTS[:2], params)
    llm.close()
    for one, other in zip(crowded, roomy, strict=True):
        assert [x.token_ids for x in one.outputs] == [x.token_ids for x in other.outputs]
    assert all(re.match("(?:ab|cd)*[ac]?$", x.text) for x in crowded[0].outputs)


@pytest.mark.soak
def test_text_that_must_follow_is_drafted(short_model):
    """Whatever the proposer drafts; where one token alone is allowed, all are accepted."""
    text = "".join(map(chr, range(0x410, 0x426)))  # 44 bytes, each a token
    params = SamplingParams(temperature=0.0, structured_outputs={"regex": text})
    found, steps = [], []
    for drafts in (None, NGRAM):
        llm = LLM(short_model, **SIZES, speculative_config=drafts)
        found += llm.generate("def f(x):", params)
        steps.append(llm.metrics()["num_steps"])
        llm.close()
    plain, drafted = (tuple(each.outputs[0].token_ids) for each in found)
    assert found[1].outputs[0].text == text and plain == drafted and len(plain) == 45
    assert steps[0] >= 45 and steps[1] <= 2 + 45 / 4 + 2  # two more may be in flight


@pytest.mark.soak
def test_a_flight_with_grammars_is_replayed(short_model, tmp_path):
    llm = LLM(short_model, **SIZES, flight_recorder="full", speculative_config=NGRAM)
    forms = {"choice": ["red", "blue"]}, {"json_object": True}
    llm.generate(PROMPTS[:2], [SamplingParams(structured_outputs=form) for form in forms])
    again = replay(llm.save_flight(tmp_path / "flight.npz"), short_model)
    assert again.is_equal
    assert {AUTOMATON, MASKS} <= {step.program for step in again.flight.steps}
    llm.close()


# Bugs that have shipped elsewhere, planted here.

real_states, real_after = runner_tables.grammar_states, runner_tables.grammar_state_after
real_allowed, real_masks = Automata.masks_of, BiasTables.masks_at
real_fill = mask_plan.fill_masks


def one_place_late(inputs, tables):
    decode, ends = real_states(inputs, tables)
    return {name: states.at[:, 1:].set(states[:, :-1]) for name, states in decode.items()}, ends


def of_the_neighbour(inputs, tables):
    decode, ends = real_states(inputs, tables)
    return {name: states[::-1] for name, states in decode.items()}, ends


def not_rolled_back(inputs, tables, acceptance):
    after = real_after(inputs, tables, acceptance)
    if not after:
        return after
    decode, _ = inputs.places.split_rows(inputs.active)
    drafted = tables.automata.along(decode.grammar_state, inputs.drafts)[:, -1]
    return {"grammar_state": after["grammar_state"].at[: len(drafted)].set(drafted)}


def bonus_unmasked(self, states):
    return real_allowed(self, states).at[3::4].set(-1)


def end_always_allowed(self, states):
    return real_allowed(self, states).at[:, 0].set(real_allowed(self, states)[:, 0] | 1)


def masks_of_the_first_place(self, slots, places):
    return real_masks(self, slots, jnp.zeros_like(places))


def masks_of_the_neighbour(matchers, drafts, masks):
    real_fill(matchers, drafts, masks)
    masks[...] = masks[::-1].copy()


def never_advanced(self, tokens):
    pass


def unbounded(most):
    return r"[ \t\n]+"


DEVICE_BUGS = [
    (verify_module, "grammar_states", one_place_late),
    (verify_module, "grammar_states", of_the_neighbour),
    (step_module, "grammar_state_after", not_rolled_back),
    (Automata, "masks_of", bonus_unmasked),
    (Automata, "masks_of", end_always_allowed),
    (regular, "blanks", unbounded),
]


def complete_before_collecting(self, step, progress):
    step = self.scheduler.complete(step)  # its masks lack the tokens in flight
    while self._in_flight:
        progress += self._collect()
    return step, self.runner.dispatch(step.plan)


HOST_BUGS = [
    (Engine, "_complete", complete_before_collecting),
    (BiasTables, "masks_at", masks_of_the_first_place),
    (mask_plan, "fill_masks", masks_of_the_neighbour),
    (Matcher, "advance", never_advanced),
    (json_schema, "blanks", unbounded),
]
NAMES = {"ids": lambda value: getattr(value, "__name__", "")}


def assert_seen(folder):
    forms = [*random_forms(12, seed=3), {"json": {"type": "array", "items": {"type": "null"}}}]
    with pytest.raises((AssertionError, ValueError)):
        Run(folder, forms, drafts=3, **IN_HALVES).check()


@pytest.mark.soak
@pytest.mark.parametrize("module, name, bug", DEVICE_BUGS, **NAMES)
def test_a_bug_of_automata_is_seen(module, name, bug, short_model, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, name, bug)
    assert_seen(short_model)


@pytest.mark.soak
@pytest.mark.parametrize("module, name, bug", HOST_BUGS, **NAMES)
def test_a_bug_of_masks_is_seen(module, name, bug, short_model, monkeypatch, fresh_programs):
    monkeypatch.setattr(module, name, bug)
    monkeypatch.setattr(Regular, "of", staticmethod(lambda form, thinking: None))
    assert_seen(short_model)

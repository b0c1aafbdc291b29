"""Calls of every kind of wrong, drawn at random: each is taken, or refused by one clear error.

What is valid is said here anew, from the documentation, not from the checks.
"""

import dataclasses
import fractions
import itertools
import json
import math
import time

import numpy as np
import pytest
from harness import FIXTURES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_folders import BYTES, folder_with, with_bytes
from trees import tensors_of

from jaxspec import LLM, BeamSearchParams, RequestOutputKind, SamplingParams, SpeculativeConfig
from jaxspec.api.inputs import InputProcessor
from jaxspec.checks import PromptTooLongError
from jaxspec.options import METHODS
from jaxspec.options.engine_options import EngineConfig
from jaxspec.options.vllm_options import RENAMED, UNDERSTOOD
from jaxspec.requests.prompts import params_of, prompts_of
from jaxspec.requests.sampling_params import LOGPROBS_MODES
from jaxspec.text import template_process
from jaxspec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.soak

LONGEST = 64  # max_model_len
MAX_SECONDS = 20


def cases(count):
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, suppress_health_check=slow)


def refusal(call):
    """Why `call` was refused; None if it was not. Anything but one clear error fails."""
    started = time.monotonic()
    try:
        call()
        return None
    except (ValueError, FileNotFoundError, TypeError) as error:
        if type(error) not in (ValueError, PromptTooLongError, FileNotFoundError):
            raise  # such as UnicodeEncodeError
        message = str(error)
    finally:
        assert time.monotonic() - started < MAX_SECONDS
    assert 20 < len(message) < 1000 and message[0].isprintable() and message[-1] in ".)", message
    return message


# Values of every kind. What can be read only once is made anew for each call, by `made`.


class Hostile:
    """Fails wherever it is touched, as an object of the caller's own may."""

    def __repr__(self):
        raise RuntimeError("repr")

    def __eq__(self, other):
        raise RuntimeError("eq")

    __hash__ = None


class Once:
    """What makes such a value."""

    def __init__(self, make):
        self.make = make


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 8, 63, 64, 2**31, 2**63, 2**64, -1, -(2**63), 10**400, 10**5000]),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, -0.5, 1e6, 1e7, 1e400, math.nan, -0.0]),
    st.sampled_from([np.int64(2), np.uint8(3), np.float32(0.5), np.float64(math.nan), np.int8(-1)]),
    st.sampled_from([True, False, np.True_, fractions.Fraction(1, 2), 1j]),
)
TEXTS = st.one_of(
    st.sampled_from(["", "a", "auto", "mtp", "greedy", "float32", "\ud800", "a\0b", "é" * 9]),
    st.sampled_from(["a" * 10**6, b"", b"abc", bytearray(b"a"), memoryview(b"abc")]),
)
ODD = st.one_of(
    st.sampled_from([None, object, print, Ellipsis, Once(Hostile), range(3), range(10**12)]),
    st.sampled_from([np.array(3), np.arange(3), np.ones((2, 2)), np.array([True]), np.array("a")]),
    st.sampled_from([{1, 2}, frozenset("a"), {3: 4}, {"prompt": "a"}, {}, [], ()]),
    st.sampled_from(
        [
            Once(lambda: [Hostile()]),
            Once(itertools.count),
            Once(lambda: iter([1, 2])),
            Once(lambda: (c for c in "ab")),
        ]
    ),
)
LEAVES = st.one_of(NUMBERS, TEXTS, ODD)
VALUES = st.one_of(
    LEAVES,
    st.lists(LEAVES, max_size=4),
    st.lists(LEAVES, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["role", "content", "prompt", "a", 3]), LEAVES, max_size=3),
)


def mostly(good, odd=VALUES):
    """Three times in four a good one."""
    return st.integers(0, 3).flatmap(lambda number: good if number else odd)


def made(value):
    if isinstance(value, Once):
        return value.make()
    if type(value) is dict:
        return {key: made(part) for key, part in value.items()}
    return type(value)(map(made, value)) if type(value) in (list, tuple) else value


def fields_of(good):
    """Some of the fields: most with a good value of theirs, one or two with any."""
    some = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in good.items()})
    any_of = st.dictionaries(st.sampled_from(sorted(good)), VALUES, max_size=2)
    return st.builds(lambda usual, odd: usual | odd, some, any_of)


# What is valid.


def is_integer(value, least=-math.inf, most=math.inf):
    is_one = type(value) is int or isinstance(value, np.integer)
    return is_one and least <= int(value) <= most


def is_number(value, least, most):
    is_one = type(value) in (int, float, fractions.Fraction) or isinstance(
        value, np.integer | np.floating
    )
    return is_one and least <= value <= most


def is_listed(value, kind):
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return is_list and all(map(kind, value))


def is_text(value):
    return isinstance(value, str) and value != ""


def is_auto(value):
    return isinstance(value, str) and value == "auto"


def is_flag(value):
    return isinstance(value, bool | np.bool_)


SAMPLING = {
    "n": ([1, 2, np.int32(3)], lambda v: is_integer(v, 1, 16_384)),
    "temperature": ([0, 0.7, np.float32(1)], lambda v: is_number(v, 0, 1e6)),
    "top_p": ([0.1, 1], lambda v: is_number(v, 0, 1) and v > 0),
    "top_k": ([-1, 0, 5], lambda v: is_integer(v, -1, 2**63 - 1)),
    "seed": ([None, 0, np.uint8(9)], lambda v: v is None or is_integer(v, -(2**63), 2**64 - 1)),
    "max_tokens": ([5, 60, None], lambda v: v is None or is_integer(v, 1, 2**63 - 1)),
    "min_tokens": ([0, 2], lambda v: is_integer(v, 0, 2**63 - 1)),
    "logprobs": ([None, 0, 20], lambda v: v is None or is_integer(v, 0, 20)),
    "prompt_logprobs": ([None, 3], lambda v: v is None or is_integer(v, 0, 20)),
    "logprobs_mode": (
        [None, *LOGPROBS_MODES],
        lambda v: v is None or isinstance(v, str) and v in LOGPROBS_MODES,
    ),
    "stop": (["a", ["a", "b"], (), None], lambda v: v is None or is_stop(v)),
    "stop_token_ids": ([[1, 2], (), None], lambda v: v is None or is_listed(v, is_integer)),
    "ignore_eos": ([True, False], is_flag),
    "min_p": ([0, 0.5, np.float32(1)], lambda v: is_number(v, 0, 1)),
    "presence_penalty": ([-2, 0.5], lambda v: is_number(v, -2, 2)),
    "frequency_penalty": ([2, np.float32(-1)], lambda v: is_number(v, -2, 2)),
    "repetition_penalty": ([1, 1.5], lambda v: is_number(v, 1e-6, 1e6)),
    "logit_bias": ([None, {}, {3: 4}, {np.int32(0): -0.5}], lambda v: v is None or is_bias(v)),
    "allowed_token_ids": (
        [None, [0, 5]],
        lambda v: v is None or is_listed(v, is_integer) and len(v),
    ),
    "bad_words": ([None, ["a", "b"]], lambda v: v is None or is_words(v)),
    "include_stop_str_in_output": ([True, False], is_flag),
    "detokenize": ([True], is_flag),
    "skip_special_tokens": ([True, False], is_flag),
    "spaces_between_special_tokens": ([True, False], is_flag),
    "truncate_prompt_tokens": (
        [None, -1, 3],
        lambda v: v is None or (is_integer(v, -1, 2**63 - 1) and v != 0),
    ),
    "output_kind": ([*RequestOutputKind], lambda v: isinstance(v, RequestOutputKind)),
    "num_speculative_tokens": ([None, 0], lambda v: v is None or is_integer(v, 0, 2**63 - 1)),
    "structured_outputs": (
        [None, {"choice": ["a"]}, {"json": {"type": "object"}}],
        lambda v: v is None or (isinstance(v, dict) and v.keys() in ({"choice"}, {"json"})),
    ),
    "thinking_token_budget": ([None, 0, 9], lambda v: v is None or is_integer(v, 0, 2**63 - 1)),
}


def wrong_parameters(fields):
    """Those that must be refused; an error names one of them."""
    wrong = [name for name, value in fields.items() if not SAMPLING[name][1](made(value))]
    if wrong:
        return wrong
    least, most = fields.get("min_tokens", 0), fields.get("max_tokens", 128)
    if most is not None and least > most:
        return ["min_tokens"]
    if fields.get("structured_outputs") and (least or made(fields.get("ignore_eos"))):
        return ["structured_outputs"]
    stops = made(fields.get("stop"))
    has_stops = stops is not None and len(stops) > 0
    return ["stop"] if has_stops and not fields.get("detokenize", True) else []


def is_bias(value):
    return isinstance(value, dict) and all(
        is_integer(token) and is_number(bias, -1e6, 1e6) for token, bias in value.items()
    )


def is_words(value):
    is_list = isinstance(value, list | tuple) and all(map(is_text, value))
    return is_list and all(word.strip() and len(word) <= 1024 for word in value)


def is_stop(value):
    stops = [value] if is_text(value) else value
    return is_listed(stops, is_text) and all(len(stop) <= 1024 for stop in stops)


@cases(500)
@given(fields_of({name: good for name, (good, _) in SAMPLING.items()}))
def test_sampling_params(fields):
    kept = []
    why = refusal(lambda: kept.append(SamplingParams(**made(fields))))
    wrong = wrong_parameters(fields)
    if why is None:
        assert not wrong
        json.dumps(dataclasses.asdict(kept[0]) | {"output_kind": None})
    else:
        assert any(why.startswith(name) for name in wrong), (wrong, why)


@cases(300)
@given(fields_of({name: good for name, (good, _) in SAMPLING.items()}))
def test_what_is_assigned_is_checked_when_a_call_uses_it(fields):
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, made(value))
    copies = []
    why = refusal(lambda: copies.extend(params_of(params, 1)))
    wrong = wrong_parameters(fields)
    if why is None:
        assert not wrong and copies[0] is not params
    else:
        assert any(why.startswith(name) for name in wrong), (wrong, why)


def is_size(least, most=2**24):
    return lambda value: value is None or is_integer(value, least, most)


def is_word(*words):
    return lambda value: (value is None or isinstance(value, str)) and value in words


def are_sizes(value):
    try:
        return value is None or is_listed(list(value)[:9], is_size(1)) and None not in value
    except (TypeError, RuntimeError):
        return False


def is_path(value):
    if value is None:
        return True
    return is_text(value) and len(value) <= 4096 and not {"\0", "\ud800"} & set(value)


def is_speculation(value):
    if value is None or isinstance(value, str):
        return value in (None, "auto", *METHODS)
    if isinstance(value, dict):
        return all(name in SPECULATION and SPECULATION[name][1](v) for name, v in value.items())
    return False


def are_ids(value, most=2**20):
    if isinstance(value, str | bytes | bytearray | dict | set | frozenset):
        return False
    try:
        ids = list(itertools.islice(iter(value), most + 1))
    except TypeError:
        return False
    return all(is_integer(i, 0) for i in ids) and 0 < len(ids) == len(set(ids)) <= most


SPECULATION = {
    "method": ([*METHODS], is_word(*METHODS)),
    "num_speculative_tokens": (
        ["auto", None, 1, 3, np.int8(15)],
        lambda v: v is None or is_auto(v) or is_integer(v, 1, 15),
    ),
    "draft_vocab": (
        [None, 9, [1, 2], range(5)],
        lambda v: v is None or is_integer(v, 1, 2**63 - 1) or are_ids(v),
    ),
    "draft_head_dtype": (["auto", None], is_word("auto", "float8_e4m3fn", None)),
    "draft_sample_method": (["greedy", "probabilistic"], is_word("greedy", "probabilistic")),
    "synthetic_acceptance_rates": ([None], lambda v: v is None),
    "rejection_sample_method": (["standard"], is_word("standard")),
    "prompt_lookup_min": ([None, 2], is_size(1, 16)),
    "prompt_lookup_max": ([None, np.int64(16)], is_size(1, 16)),
    "model": (["a/b"], lambda v: v is not None and is_path(v)),
    "aux_layer_ids": ([None, [1, 2]], lambda v: v is None or are_ids(v)),
    "suffix_decoding_max_tree_depth": ([24], lambda v: is_integer(v, 1, 256)),
    "suffix_decoding_min_token_prob": ([0.1, 0], lambda v: is_number(v, 0, 1)),
    "proposer": (["module:Class"], lambda v: isinstance(v, str) and v == "module:Class"),
    "layers": ([[0, 2], range(3)], lambda v: are_ids(v, 16)),
    "folder": (["a"], lambda v: v is not None and is_path(v)),
    "request_id_prefix": (["", "a"], lambda v: isinstance(v, str)),
}


OPTIONS = {
    "model": ([None, "a/b"], is_path),
    "tokenizer": ([None, "a/b"], is_path),
    "skip_tokenizer_init": ([True, False], is_flag),
    "generation_config": (["auto", "vllm", "a/b"], lambda v: v is not None and is_path(v)),
    "speculative_config": (["auto", None, {"num_speculative_tokens": 2}], is_speculation),
    "load_format": (["auto", "dummy"], is_word("auto", "dummy")),
    "dtype": (["auto", "float32"], is_word("float32", "bfloat16", "auto")),
    "kv_dtype": ([None, "bfloat16"], is_word("bfloat16", "float8_e4m3fn", None)),
    "state_policy": (["auto", "replay"], is_word("auto", "snapshot", "replay")),
    "state_dtype": (["float32"], is_word("float32", "float16", "bfloat16")),
    "max_num_seqs": ([1, np.int32(4)], lambda v: is_integer(v, 1, 2**24)),
    "max_model_len": ([None, 64], is_size(1)),
    "max_in_flight": ([0, 2], lambda v: is_integer(v, 0, 2**24)),
    "steps_per_dispatch": (["auto", 1], lambda v: is_auto(v) or is_integer(v, 1, 2**24)),
    "page_size": ([16], lambda v: is_integer(v, 1, 2**24)),
    "num_pages": ([None, 9], is_size(1)),
    "gpu_memory_utilization": ([0.5, 1], lambda v: is_number(v, -1.8e308, 1.8e308)),
    "max_num_batched_tokens": ([None, 64], is_size(1)),
    "long_prefill_token_threshold": ([None, 64], is_size(1)),
    "max_prefill_seqs": ([None, 4], is_size(1)),
    "max_step_ms": ([None, 30, 0.5], lambda v: v is None or is_number(v, 1e-300, 1.8e308)),
    "decode_buckets": ([None, [1, 4], np.arange(1, 3)], are_sizes),
    "prefill_buckets": ([None, (16, 32)], are_sizes),
    "seed": ([0, np.int64(-5)], lambda v: is_integer(v, -(2**63), 2**64 - 1)),
    "compilation_cache": ([None, "a"], is_path),
    "show_progress": ([None, True], lambda v: v is None or is_flag(v)),
}
UNSURE = ("decode_buckets", "prefill_buckets", "draft_vocab", "speculative_config")  # iterators


@cases(450)
@given(fields_of({name: good for name, (good, _) in OPTIONS.items()}))
def test_options(fields):
    kept = []
    why = refusal(
        lambda: kept.append(
            EngineConfig.of(
                made(fields.get("model")),
                {name: made(value) for name, value in fields.items() if name != "model"},
            )
        )
    )
    sure = {name: value for name, value in fields.items() if name not in UNSURE}
    wrong = [name for name, value in sure.items() if not OPTIONS[name][1](value)]
    if why is None:
        assert not wrong
        hash(kept[0])
    else:
        unsure = [*UNSURE, *SPECULATION] if set(UNSURE) & set(fields) else []
        assert any(name in why for name in [*wrong, *unsure]), (wrong, why)


@cases(300)
@given(st.sampled_from(sorted({*RENAMED, *UNDERSTOOD})), mostly(st.sampled_from([1, None, "auto"])))
def test_options_in_the_words_of_vllm(name, value):
    """Each is taken or refused by its name, or by that of the option that it is here."""
    kept = []
    why = refusal(lambda: kept.append(EngineConfig.of(None, {name: made(value)})))
    if why is not None:
        assert name in why or (name in RENAMED and RENAMED[name].name in why)
    elif name in UNDERSTOOD:
        assert kept[0] == EngineConfig()


@cases(200)
@given(fields_of({name: good for name, (good, _) in SPECULATION.items()}))
def test_speculation(fields):
    why = refusal(lambda: SpeculativeConfig.read(made(fields)))
    wrong = [n for n, v in fields.items() if n != "draft_vocab" and not SPECULATION[n][1](made(v))]
    if why is None:
        unsure = ["synthetic_acceptance_rates"]
        if fields.get("method") == "extract_hidden_states":
            unsure.append("num_speculative_tokens")  # 0 is right there
        assert not [name for name in wrong if name not in unsure]
    else:
        asked = [*wrong, *(["draft_vocab"] if "draft_vocab" in fields else [])]
        # An option of another method, or a number that this one does not take.
        words = "speculative method", "Unknown keys", "The method", "with the method"
        assert any(name in why for name in (*asked, *words)), (asked, why)


@pytest.mark.parametrize("options", [{"n": 1}, {"max_num_seq": 1}, {"": 1}, {"self": 1}])
def test_an_unknown_option_is_a_type_error(options):
    with pytest.raises(TypeError, match="LLM has no option"):
        EngineConfig.of(None, options)
    with pytest.raises(TypeError, match="LLM has no option"):
        LLM(data_parallel_size=2, stream_interval=4)


# Updates of weights.

TREE = {name: np.asarray(each) for name, each in tensors_of(FIXTURES / "qwen3").items()}
NORM = "model.norm.weight"
UPDATES = {
    "weights": [TREE, Once(lambda: iter(TREE.items())), {NORM: TREE[NORM]}, TREE | {NORM: 1.0}],
    "mode": ["keep", "recompute", "abort", "wait"],
    "keep": [(), ["*"], ["mtp.*"]],
    "check_finite": [True, False],
    "drafter": [None, TREE],
}


@pytest.fixture(scope="module")
def updatable():
    sizes = {"max_model_len": LONGEST, "max_num_seqs": 2, "show_progress": False}
    with LLM(FIXTURES / "qwen3", dtype="float32", **sizes) as llm:
        yield llm


@cases(100)
@given(fields_of(UPDATES), mostly(st.sampled_from([None, "a", "0", "v" * 128]), TEXTS))
def test_updates(updatable, fields, version):
    fields = {name: made(value) for name, value in fields.items()} | {"version": made(version)}
    before = updatable.weight_version, updatable._runner.weights
    if refusal(lambda: updatable.update_weights(**fields)) is not None:
        assert (updatable.weight_version, updatable._runner.weights) == before
    else:
        assert fields.get("mode", "keep") in ("keep", "recompute", "abort")
        assert fields.get("drafter") is None and updatable.weight_version != before[0]


# Prompts and chats, by a tokenizer of bytes.


@pytest.fixture(scope="module")
def processor():
    return InputProcessor(
        Tokenizer(BYTES),
        vocab_size=264,
        max_model_len=LONGEST,
        eos_ids=[258],
        seed=0,
    )


LISTS = [[1, 2], (3,), np.arange(4), [np.int8(5)], [263], [264], [1] * 70, range(10**12)]
GOOD_PROMPTS = st.one_of(
    mostly(st.sampled_from(LISTS)),
    st.sampled_from(["a", "abc", {"prompt": "ab"}, "a" * 59, "a" * 60, "\ud800", "a" * 10**6]),
    mostly(st.sampled_from(LISTS)).map(lambda ids: {"prompt_token_ids": ids}),
)
PROMPTS = mostly(GOOD_PROMPTS)


def num_tokens(prompt):
    """Tokens of a valid prompt; None if it is none, or it may be either."""
    if isinstance(prompt, dict) and len(prompt) == 1:
        ((key, value),) = prompt.items()
        prompt = value if key in ("prompt", "prompt_token_ids") else None
        if isinstance(value, str) == (key == "prompt_token_ids"):
            return None
    if is_listed(prompt, lambda i: is_integer(i, 0, 263)) or type(prompt) is range:
        return len(prompt)
    if isinstance(prompt, str) and "\ud800" not in prompt:
        return len(prompt.encode())
    return None


@cases(450)
@given(
    mostly(st.lists(PROMPTS, min_size=1, max_size=3), PROMPTS),
    mostly(st.sampled_from([1, 4, 5, 9])),
)
def test_prompts(processor, prompts, params):
    if type(params) is int and 0 < params < 10:
        params = SamplingParams(max_tokens=params)
    samples = []

    def call():
        batch = prompts_of(made(prompts))
        samples.extend(processor.process(batch, params_of(made(params), len(batch))))

    why = refusal(call)
    is_one = not isinstance(prompts, list) or (prompts and is_integer(prompts[0]))
    batch = [prompts] if is_one else prompts
    counts = [num_tokens(made(prompt)) for prompt in batch]
    if why is None:
        for count, group in zip(counts, samples, strict=False):
            ids = group[0].request.prompt
            assert set(map(type, ids)) == {int} and 0 < len(ids) < group[0].request.max_len
            assert group[0].request.max_len <= LONGEST
            assert count in (None, len(ids))
    elif isinstance(params, SamplingParams):
        good = [c is not None and 0 < c < LONGEST for c in counts]
        assert not all(good), why


SOURCES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    "{{ messages | tojson }}{{ tools | tojson }}{{ switch | tojson }}",
    "{{ messages[0].content + 1 }}",
    "{{ switch * 10 ** 10 }}",
    "{{ messages * 10 ** 9 }}",
    "{{ raise_exception(messages) }}",
    "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f(messages | string) }}",
    "{{ strftime_now(switch) }}",
    "{% if %}",
]
GOOD_MESSAGES = st.sampled_from(
    [{"role": "user", "content": "hi"}, {"role": "user", "content": "\ud800", "thinking": [1]}]
)
PARTS = st.fixed_dictionaries({}, optional={"role": VALUES, "content": VALUES, "thinking": VALUES})
MESSAGES = st.lists(mostly(GOOD_MESSAGES, mostly(PARTS)), max_size=3)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Tokenizers with one template each; all of their processes together may use a minute."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "TIME_LIMIT", 1.0)
        patch.setattr(template_process, "MAX_MEMORY", 2**28)
        for number, source in enumerate(SOURCES):
            folder = tmp_path_factory.mktemp(f"chat{number}")
            found.append(Tokenizer(folder_with(folder, chat_template_jinja=source)))
        yield found


@cases(200)
@given(
    st.integers(0, 10**6),
    mostly(MESSAGES),
    mostly(st.sampled_from([None, [], [{"type": "function"}]])),
    mostly(st.sampled_from(["%Y", True, 3, None, ["a"], {"a": 1}])),
)
def test_chats(chats, which, messages, tools, switch):
    # The ones that run into a limit take its time, so they come less often.
    tokenizer = chats[which % 6 if which % 20 else which // 20 % len(chats)]
    texts = []
    why = refusal(
        lambda: texts.append(
            tokenizer.render_chat(made(messages), made(tools), switch=made(switch))
        )
    )
    assert (why is None) == (len(texts) == 1)
    if why is not None:
        named = ("messages", "tools", "conversation", "switch")
        assert any(name in why for name in named)


# Whole calls: what is refused leaves nothing behind, and the next call is answered as ever.


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = with_bytes("qwen3", tmp_path_factory.mktemp("whole"))
    options = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [64]}
    with LLM(folder, dtype="float32", max_model_len=LONGEST, **options) as made:
        made.warm_up()
        ANSWER["ids"] = made.generate([1, 2, 3], NEXT)[0].outputs[0].token_ids
        yield made


NEXT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)  # what follows a refusal
ANSWER = {}  # to that, before anything is refused
QUICK = {name: good for name, (good, _) in SAMPLING.items()}
QUICK |= {"max_tokens": [1, 3], "min_tokens": [0], "temperature": [0]}
CHATS = st.one_of(
    st.just([{"role": "user", "content": "hi"}]),
    st.just([[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]] * 2),
    MESSAGES,
)
ARGUMENTS = {
    "use_tqdm": [None, False],
    "priority": [None, 0, -1],
    "request_ids": [None, ["a"]],
    "request_id": [None, "a"],
    "tools": [None, []],
    "add_generation_prompt": [True, False],
    "continue_final_message": [False, True],
    "chat_template": [None, "{{ messages[0].content }}"],
    "chat_template_kwargs": [None, {"a": 1}],
    "temperature": [0],
}
WAYS = {
    "generate": (PROMPTS, ["use_tqdm", "priority", "request_ids"]),
    "stream": (PROMPTS, ["priority", "request_id"]),
    "chat": (CHATS, [name for name in ARGUMENTS if name != "request_id"]),
    "stream_chat": (CHATS, [name for name in ARGUMENTS if name != "use_tqdm"]),
}


@st.composite
def calls(draw):
    """A way to call, its first argument, fields of its parameters, and what it gets by name."""
    way = draw(st.sampled_from(sorted(WAYS)))
    subject, names = WAYS[way]
    some = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), mostly(st.sampled_from(ARGUMENTS[name])))
    )
    params = draw(mostly(st.just({}), fields_of(QUICK)))
    return way, draw(subject), params, dict(draw(st.lists(some, max_size=2)))


@cases(300)
@given(calls())
def test_calls_are_answered_or_refused_and_leave_nothing(llm, call):
    way, subject, fields, arguments = call
    given, free = {name: made(value) for name, value in arguments.items()}, pages_and_slots(llm)

    def answer():
        params = SamplingParams(max_tokens=2, temperature=0)
        for name, value in fields.items() if isinstance(fields, dict) else ():
            params = dataclasses.replace(params, **{name: made(value)})
        params = params if isinstance(fields, dict) else made(fields)
        outputs = getattr(llm, way)(made(subject), params, **given)
        assert all(output.finished for output in outputs if hasattr(output, "finished"))

    try:
        why = refusal(answer)
    except TypeError as error:  # such as a keyword that this way does not have
        why = str(error)
        assert any(name in why for name in arguments), why
    assert pages_and_slots(llm) == free and not llm.session.has_work
    if why is not None:
        (output,) = llm.generate([1, 2, 3], NEXT)
        assert output.outputs[0].token_ids == ANSWER["ids"]


SEARCHES = {"beam_width": [1, 2], "max_tokens": [1, 2], "ignore_eos": [False]}
SEARCHES |= {"temperature": [0.0], "length_penalty": [1.0, -2]}


@cases(100)
@given(PROMPTS, st.one_of(mostly(st.sampled_from([0, 3])), fields_of(SEARCHES)))
def test_scores_and_searches_are_answered_or_refused_and_leave_nothing(llm, subject, asked):
    free = pages_and_slots(llm)

    def answer():
        if not isinstance(asked, dict) or not asked.keys() <= SEARCHES.keys():
            llm.score(made(subject), made(asked))
            return
        params = BeamSearchParams(beam_width=2, max_tokens=2)
        for name, value in asked.items():
            params = dataclasses.replace(params, **{name: made(value)})
        llm.beam_search(made(subject), params)

    refusal(answer)
    assert pages_and_slots(llm) == free and not llm.session.has_work
    (output,) = llm.generate([1, 2, 3], NEXT)
    assert output.outputs[0].token_ids == ANSWER["ids"]


def pages_and_slots(llm):
    scheduler = llm.session.scheduler
    return scheduler.pages.num_free, len(scheduler._free_slots), len(llm.session._samples)


@cases(40)
@given(st.integers(0, 12), st.integers(1, 3), st.sampled_from(["close", "abort", "drop", "read"]))
def test_leaving_in_the_middle_frees_pages_and_slots(llm, pieces, n, way):
    free = pages_and_slots(llm)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=n)
    stream = llm.stream("abc", params, request_id="left")
    taken = list(itertools.islice(stream, pieces))
    if way == "close":
        stream.close()
    elif way == "abort":
        llm.abort("left")
        rest = list(stream)
        if pieces and taken:
            assert {piece.finish_reason for piece in rest} <= {"abort", None}
    elif way == "drop":
        del stream
    else:
        assert sum(len(piece.token_ids) for piece in [*taken, *stream]) == 40 * n
    assert pages_and_slots(llm) == free and not llm.session.has_work


# A tokenizer's files: a good one in which something is changed, or anything.

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from(["", "a", "\ud800", 1e9])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["content", "name", "template", "type"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
FIELDS = {
    "tokenizer_config.json": ["chat_template", "eos_token", "bos_token"],
    "special_tokens_map.json": ["eos_token", "bos_token"],
    "chat_template.json": ["chat_template"],
}
WHOLE = json.loads((BYTES / "tokenizer.json").read_text())


@st.composite
def damaged(draw):
    """The tokenizer with a value somewhere in it that is another."""
    whole = json.loads(json.dumps(WHOLE))
    place = whole
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(keys))
        if draw(st.booleans()) or not (isinstance(place[key], dict | list) and place[key]):
            if draw(st.booleans()) and isinstance(place, dict):
                del place[key]
            else:
                place[key] = draw(JSON)
            return json.dumps(whole).encode()
        place = place[key]


@st.composite
def files(draw):
    """Contents by name."""
    found = {
        "tokenizer.json": draw(damaged()) if draw(st.booleans()) else json.dumps(WHOLE).encode()
    }
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True)):
        content = draw(st.one_of(JSON, st.dictionaries(st.sampled_from(FIELDS[name]), JSON)))
        found[name] = json.dumps(content).encode()
    if draw(st.integers(0, 9)) == 0:
        name = draw(st.sampled_from(sorted([*FIELDS, "tokenizer.json", "chat_template.jinja"])))
        found[name] = draw(st.binary(max_size=20))
    return found


@cases(400)
@given(files(), st.text(max_size=20))
def test_files_of_a_tokenizer(tmp_path_factory, contents, text):
    folder = tmp_path_factory.mktemp("files")
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    tokenizers = []
    why = refusal(lambda: tokenizers.append(Tokenizer(folder)))
    if why is not None:
        assert any(f"/{name}" in why for name in contents), why
        return
    (tokenizer,) = tokenizers
    assert all(type(token) is int for token in tokenizer.eos_ids)
    for call in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(range(270))):
        why = refusal(call)
        assert why is None or "The tokenizer of" in why or "surrogate" in why

"""Chats as text: what templates have, may and get, and what is refused."""

import collections
import enum
import itertools
import types

import numpy as np
import pytest
from tokenizer_folders import BYTES, folder_with

from jaxspec.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BYTES)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <b>?"}]
HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHé <b>?<|im_end|>\n"
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>"}}


def test_a_chat_renders_as_its_template_says(tokenizer):
    prompt = "<|im_start|>assistant\n"
    assert tokenizer.render_chat(CHAT) == HEAD + prompt
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == HEAD
    no_thinking = tokenizer.render_chat(CHAT, enable_thinking=False)
    assert no_thinking == HEAD + prompt + "<think>\n\n</think>\n\n"
    with_tools = tokenizer.render_chat(CHAT, tools=[TOOL], add_generation_prompt=False)
    assert with_tools == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n"
        '{"type": "function", "function": {"name": "f", "description": "<é>"}}<|im_end|>\n'
        "<|im_start|>user\nHé <b>?<|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_each_of_its_names(name, tokenizer):
    answer = {"role": "assistant", "content": "4", name: "2+2"}
    text = tokenizer.render_chat([answer], add_generation_prompt=False)
    assert text == "<|im_start|>assistant\n<think>\n2+2\n</think>\n\n4<|im_end|>\n"


TEMPLATES = {
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}": "hi",
    "{{ messages | tojson }}": '[{"role": "user", "content": "hi"}]',
    "{{ messages[0] | tojson(indent=1) }}": '{\n "role": "user",\n "content": "hi"\n}',
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
    "  {% if true %}\nx\n  {% endif %}\n{{ bos_token }}{{ eos_token }}": "x\n<s><|im_end|>",
    "{{ strftime_now('%Y') | length }}{{ documents is none }}": "4True",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_have_what_checkpoints_use(template, tmp_path):
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>", "add_bos_token": False}
    folder = folder_with(tmp_path, chat_template_jinja=template, tokenizer_config_json=settings)
    text = Tokenizer(folder).render_chat([{"role": "user", "content": "hi"}])
    assert text == TEMPLATES[template]


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% for i in range(99999999) %}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(template, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer(folder_with(tmp_path, chat_template_jinja=template))
    with pytest.raises(ValueError, match="chat template of .* must accept"):
        tokenizer.render_chat(messages)
    assert messages == [{"role": "user", "content": "hi"}]


HIDDEN = [
    "{{ ''.__class__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "{{ messages | attr('__class__') }}",
]


@pytest.mark.parametrize("template", HIDDEN)
def test_a_template_sees_nothing_of_the_python_behind_its_values(template, tmp_path):
    tokenizer = Tokenizer(folder_with(tmp_path, chat_template_jinja=template))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 'a' + none }}", "TypeError"),
        ("{{ nothing.content }}", "'nothing' is undefined"),
    ],
)
def test_a_failing_template_says_why(template, reason, tmp_path):
    tokenizer = Tokenizer(folder_with(tmp_path, chat_template_jinja=template))
    with pytest.raises(ValueError, match=reason):
        tokenizer.render_chat([])


def test_a_message_must_be_a_mapping(tokenizer):
    with pytest.raises(ValueError, match="must be a mapping with role and content"):
        tokenizer.render_chat("Hello")


def test_a_checkpoint_without_a_template_says_so(tmp_path):
    tokenizer = Tokenizer(folder_with(tmp_path))
    with pytest.raises(ValueError, match="has none"):
        tokenizer.render_chat(CHAT)


def test_a_template_without_an_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxspec.text.template_process.TIME_LIMIT", 0.5)
    endless = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = Tokenizer(folder_with(tmp_path, chat_template_jinja=endless))
    with pytest.raises(ValueError, match="must accept .*, but it took more than 0.5 seconds. Che"):
        tokenizer.render_chat([])


class Role(enum.StrEnum):
    USER = "user"


def test_a_conversation_may_be_of_any_types_that_json_has(tokenizer):
    message = {"role": "user", "content": "hi"}
    expected = tokenizer.render_chat([message], enable_thinking=False)
    for same in (
        [types.MappingProxyType(message)],
        (collections.OrderedDict(message),),
        iter([message]),
        [{"role": Role.USER, "content": np.str_("hi")}],
    ):
        assert tokenizer.render_chat(same, enable_thinking=np.False_) == expected


@pytest.mark.parametrize("messages", [None, 3, "Hello", b"a", {"role": "user"}, ["a"], [None], {1}])
def test_messages_are_a_list_of_mappings(messages, tokenizer):
    with pytest.raises(ValueError, match="Each of messages must be a mapping with role and conten"):
        tokenizer.render_chat(messages)
    if messages is not None:
        with pytest.raises(ValueError, match="Each of tools must be a mapping with type and func"):
            tokenizer.render_chat([], tools=messages)


@pytest.mark.parametrize(
    "value",
    [object(), b"a", float("nan"), {1, 2}, 1j, print, np.arange(3), 10**400, [[{"a": object()}]]],
    ids=lambda value: type(value).__name__,
)
def test_other_values_than_those_of_json_are_refused(value, tokenizer):
    rule = r"must be JSON's values \(.*\), and {}.* is .*\. Give it as text"
    with pytest.raises(ValueError, match=rule.format(r"messages\[0\]\['content'\]")):
        tokenizer.render_chat([{"role": "user", "content": value}])
    with pytest.raises(ValueError, match=rule.format(r"tools\[0\]\['x'\]")):
        tokenizer.render_chat([], tools=[{"x": value}])
    with pytest.raises(ValueError, match=rule.format("switch")):
        tokenizer.render_chat([], switch=value)


def test_keys_are_texts_and_a_prompt_is_asked_for_or_not(tokenizer):
    with pytest.raises(ValueError, match=r"keys of messages, .* texts, and messages\[0\] has 3"):
        tokenizer.render_chat([{3: 4}])
    with pytest.raises(ValueError, match="add_generation_prompt must be True or False, got 'no'"):
        tokenizer.render_chat([], add_generation_prompt="no")


def test_a_conversation_has_an_end(tokenizer):
    endless = {"role": "user"}
    endless["content"] = [endless, endless]
    with pytest.raises(ValueError, match="64 deep in each other, and messages.* has more"):
        tokenizer.render_chat([endless])
    wide = []
    for _ in range(30):
        wide = [wide, wide]
    for content in (wide, "a" * (2**23 + 1), [[]] * 2**19):
        with pytest.raises(ValueError, match="may have 8,388,608 characters, of which each list"):
            tokenizer.render_chat([{"role": "user", "content": content}])
    with pytest.raises(ValueError, match="A chat may have at most 100,000 messages, got more"):
        tokenizer.render_chat(itertools.repeat({}))

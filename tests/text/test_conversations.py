"""What conversations are told apart by, and what the content of a message may be."""

import pytest
from tokenizer_folders import BYTES, folder_with

from jaxspec.text.conversations import check_options, conversations_of, with_plain_contents
from jaxspec.text.tokenizer import Tokenizer

HI = {"role": "user", "content": "Hi"}
WALKS = "{% for m in messages %}{% for p in m['content'] %}{{ p.text }};{% endfor %}{% endfor %}"
WRITES = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
KEEPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]


def test_a_call_has_one_conversation_or_several():
    assert conversations_of([HI, HI]) == [[HI, HI]] and conversations_of([]) == [[]]
    assert conversations_of([[HI], [HI, HI]]) == [[HI], [HI, HI]]
    assert conversations_of(iter([HI])) == [[HI]] and conversations_of(iter([[HI]])) == [[HI]]
    for wrong in ([3], ["ab"], [[HI], 3], [None]):
        with pytest.raises(ValueError, match="messages must be a list of messages such as"):
            conversations_of(wrong)


@pytest.mark.parametrize(
    ("source", "content"),
    [
        (WRITES, "a\nb\nc"),
        ("{% if '</think>' in message.content %}{% endif %}", "a\nb\nc"),
        (WALKS, [{"type": "text", "text": letter} for letter in "abc"]),
        ("{%- for item in content %}", [{"type": "text", "text": letter} for letter in "abc"]),
    ],
)
def test_parts_are_joined_unless_the_template_walks_through_them(source, content):
    given = [HI, {"role": "user", "content": PARTS}, {"role": "assistant"}]
    assert with_plain_contents(given, source) == [
        HI,
        {"role": "user", "content": content},
        {"role": "assistant"},
    ]
    assert given[1]["content"] is PARTS


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video", ""])
def test_a_part_that_is_no_text_is_refused_by_its_place_and_kind(kind):
    parts = [PARTS[0], {"type": kind, "image_url": "x"}]
    with pytest.raises(ValueError) as caught:
        with_plain_contents([HI, {"role": "user", "content": parts}], WRITES)
    assert str(caught.value).startswith(f"messages[1]['content'][1] is a part of the type {kind!r}")


@pytest.mark.parametrize("part", [3, None, {}, {"type": "text"}, {"text": "a"}, ["a"]])
def test_what_is_no_part_is_refused(part):
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]\[0\] must be .*, got "):
        with_plain_contents([{"role": "user", "content": [part]}], WRITES)


def test_an_argument_that_no_chat_has_is_a_type_error_with_the_way_out():
    check_options({"tools": None, "chat_template": None})
    with pytest.raises(TypeError, match="'enable_thinking'; .* goes into chat_template_kwargs"):
        check_options({"enable_thinking": False})


# What `Tokenizer.render_chat` does with them.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    named = [{"name": "default", "template": WRITES}, {"name": "parts", "template": WALKS}]
    settings = {"chat_template": named}
    return Tokenizer(folder_with(tmp_path_factory.mktemp("t"), tokenizer_config_json=settings))


def test_another_template_is_a_text_or_one_of_the_checkpoint_s_by_name(tokenizer):
    chat = [{"role": "user", "content": PARTS}]
    assert tokenizer.render_chat(chat) == "<user>a\nb\nc</>"
    assert tokenizer.render_chat(chat, chat_template="parts") == "a;b;c;"
    assert tokenizer.render_chat(chat, chat_template="{{ messages[0].role }}!") == "user!"
    for wrong in (3, "", b"x"):
        with pytest.raises(ValueError, match="chat_template must be a text that is not empty"):
            tokenizer.render_chat(chat, chat_template=wrong)


@pytest.mark.parametrize("content", ["The sum is", "trimmed by the template  ", "<user>", PARTS])
def test_the_last_message_is_continued_where_its_content_ends(content, tokenizer):
    chat = [HI, {"role": "assistant", "content": content}]
    wanted = {"add_generation_prompt": False, "continue_final_message": True}
    text = tokenizer.render_chat(chat, **wanted)
    content = content if content is PARTS else content.rstrip()
    assert text == "<user>Hi</><assistant>" + (content if content is not PARTS else "a\nb\nc")
    if content is PARTS:
        assert tokenizer.render_chat(chat[1:], chat_template="parts", **wanted) == "a;b;c"


def test_spaces_at_the_end_are_continued_if_the_template_keeps_them(tokenizer):
    chat = [HI, {"role": "assistant", "content": "so  "}]
    wanted = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.render_chat(chat, chat_template=KEEPS, **wanted).endswith("<assistant>so  ")


def test_nulls_are_absent_and_no_content_is_empty(tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    written = "{{ messages[1].content }}|{{ messages[1] | tojson }}"
    found = tokenizer.render_chat([HI, call], chat_template=written)
    assert found == '|{"role": "assistant", "content": ""}'


def test_switches_of_servers_are_no_part_of_a_tool(tokenizer):
    function = {"name": "f", "parameters": {"strict": None}}
    plain = {"type": "function", "function": function}
    texts = [
        tokenizer.render_chat([HI], [tool], chat_template="{{ tools | tojson }}")
        for tool in (
            plain,
            {**plain, "function": {**function, "strict": False, "description": None}},
            {**plain, "strict": True, "cache_control": {"type": "ephemeral"}},
        )
    ]
    assert len(set(texts)) == 1 and '"parameters": {"strict": null}' in texts[0]


SYSTEM = {"role": "system", "content": "RULES"}
REFUSES = (
    "{% for m in messages %}{% if m.role == 'developer' or m.role == 'system' and not loop.first %}"
    "{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
OMITS = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [REFUSES, OMITS])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_several_system_messages_are_one_where_the_template_has_one(source, role, tokenizer):
    second = {"role": role, "content": "PERMISSIONS"}
    one = "<system>RULES\n\nPERMISSIONS<user>Hi"
    for chat in ([SYSTEM, second, HI], [SYSTEM, HI, second]):
        assert tokenizer.render_chat(chat, chat_template=source) == one
        parts = {
            "role": role,
            "content": [{"type": "text", "text": t} for t in ("PER", "MISSIONS")],
        }
        chat = [parts if message is second else message for message in chat]
        text = tokenizer.render_chat(chat, chat_template=source)
        assert text == one.replace("PERM", "PER\nM")
    alone = tokenizer.render_chat([{**SYSTEM, "role": role}, HI], chat_template=source)
    assert alone == "<system>RULES<user>Hi"
    walked = tokenizer.render_chat([SYSTEM, HI, second], chat_template=KEEPS)
    assert walked == f"<system>RULES<user>Hi<{role}>PERMISSIONS"


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([HI], {}, "add_generation_prompt=False with it"),
        ([], {"add_generation_prompt": False}, "needs a last message with a text to continue"),
        ([{"role": "a"}], {"add_generation_prompt": False}, "needs a last message with a text"),
        (
            [HI],
            {"add_generation_prompt": False, "chat_template": "no content"},
            "needs a chat template that writes the last message's content out",
        ),
    ],
)
def test_what_can_t_be_continued_is_refused(chat, options, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat(chat, continue_final_message=True, **options)
    with pytest.raises(ValueError, match="continue_final_message must be True or False, got 1"):
        tokenizer.render_chat(chat, continue_final_message=1)


def test_switches_are_a_dict_and_no_arguments(tokenizer):
    switches = {"documents": [{"text": "a"}], "enable_thinking": False}
    source = "{{ documents[0].text }}{{ enable_thinking }}"
    text = tokenizer.render_chat([HI], chat_template=source, chat_template_kwargs=switches)
    assert text == "aFalse"
    for wrong in (3, ["a"], "a"):
        with pytest.raises(ValueError, match="chat_template_kwargs must be a dict of the template"):
            tokenizer.render_chat([HI], chat_template_kwargs=wrong)
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs must not hold '{name}'"):
            tokenizer.render_chat([HI], chat_template_kwargs={name: []})


def test_the_byte_tokenizer_s_template_takes_parts():
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert Tokenizer(BYTES).render_chat(chat) == Tokenizer(BYTES).render_chat([HI])

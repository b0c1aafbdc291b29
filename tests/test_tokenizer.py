import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from jaxspec.tokenizer import Tokenizer

BYTES = Path(__file__).parent / "fixtures" / "tokenizer_bytes"
SPECIAL = {"<|im_start|>": 257, "<|im_end|>": 258, "<think>": 259, "</think>": 260}
UNICODE = "naïve 你好 🙂‍↔️ \u0301é \ufffd\x00\r\n end"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BYTES)


def folder_with(tmp_path, **files):
    """A copy of the byte tokenizer's tokenizer.json, with these files beside it."""
    shutil.copy(BYTES / "tokenizer.json", tmp_path)
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return tmp_path


def split(ids, rng):
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def streamed(stream, pieces):
    return "".join([*(stream.push(piece) for piece in pieces), stream.flush()])


def test_text_survives_encoding(tokenizer):
    assert tokenizer.encode(UNICODE) == list(UNICODE.encode())
    assert tokenizer.decode(tokenizer.encode(UNICODE)) == UNICODE


def test_special_tokens_are_decoded_only_on_request(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids == [97, 258, 98]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_an_id_without_a_token_decodes_to_nothing(tokenizer):
    assert tokenizer.decode([97, 99_999, 98]) == "ab"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("alphabet", ["text", "bytes", "all ids"])
def test_streamed_text_is_the_decoded_text(alphabet, skip_special_tokens, tokenizer):
    rng = random.Random(alphabet)
    for _ in range(100):
        if alphabet == "text":
            ids = tokenizer.encode("".join(rng.choices(UNICODE, k=20)))
        else:
            ids = rng.choices(range(256 if alphabet == "bytes" else 270), k=rng.randrange(30))
        expected = tokenizer.decode(ids, skip_special_tokens)
        for pieces in ([ids], [[i] for i in ids], split(ids, rng)):
            assert streamed(tokenizer.stream(skip_special_tokens), pieces) == expected


def sentencepiece_folder(tmp_path):
    """A tokenizer that decodes as SentencePiece's do: byte tokens, and no space at the start."""
    words = ["<unk>", "▁", "▁Hello", "▁world", "lo", "▁▁", "你", "�", "</s>"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_streamed_text_is_the_decoded_text_with_byte_fallback(tmp_path):
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path))
    euro, first = [9 + byte for byte in "€".encode()], [2, 3]
    assert tokenizer.decode([*first, *euro]) == "Hello world€"
    rng = random.Random(0)
    choices = [*range(9), *range(9), *euro, *euro, 9 + 0xE4, 9 + 65]
    for _ in range(300):
        ids = rng.choices(choices, k=rng.randrange(16))
        for pieces in ([ids], [[i] for i in ids], split(ids, rng)):
            assert streamed(tokenizer.stream(), pieces) == tokenizer.decode(ids)


def test_unfinished_characters_wait(tokenizer):
    stream = tokenizer.stream()
    smile = list("🙂".encode())
    assert [stream.push([byte]) for byte in [97, *smile, 98]] == ["a", "", "", "", "🙂", "b"]
    assert stream.push([98, *smile[:2]]) == "b"
    assert stream.flush() == "\ufffd"
    assert stream.push([99]) == "c"


def test_invalid_bytes_do_not_hold_up_what_follows(tokenizer):
    stream = tokenizer.stream()
    assert stream.push([0xFF, 0xFE]) == "\ufffd"
    assert stream.push([97]) == "\ufffda"


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


def test_chat_gives_the_ids_of_the_rendered_text(tokenizer):
    ids = tokenizer.chat([{"role": "user", "content": "a"}], enable_thinking=False)
    assert ids == [
        *(257, *b"user\n", *b"a", 258, *b"\n"),
        *(257, *b"assistant\n", 259, *b"\n\n", 260, *b"\n\n"),
    ]


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
        tokenizer.chat([])


def test_a_message_must_be_a_mapping(tokenizer):
    with pytest.raises(ValueError, match="must be a mapping with role and content"):
        tokenizer.chat("Hello")


def test_a_template_is_taken_from_its_own_file_then_the_settings_then_the_old_file(tmp_path):
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    folder = folder_with(tmp_path, chat_template_json={"chat_template": "old"})
    assert Tokenizer(folder).render_chat([]) == "old"
    folder_with(tmp_path, tokenizer_config_json={"chat_template": "settings"})
    assert Tokenizer(folder).render_chat([]) == "settings"
    folder_with(tmp_path, tokenizer_config_json={"chat_template": named})
    assert Tokenizer(folder).render_chat([]) == "named"
    assert Tokenizer(folder).render_chat([], tools=[TOOL]) == "tools"
    folder_with(tmp_path, chat_template_jinja="own")
    assert Tokenizer(folder).render_chat([]) == "own"


def test_a_checkpoint_without_a_template_says_so(tmp_path):
    tokenizer = Tokenizer(folder_with(tmp_path))
    with pytest.raises(ValueError, match="has none"):
        tokenizer.chat(CHAT)


def test_a_folder_without_a_tokenizer_points_to_token_ids(tmp_path):
    with pytest.raises(FileNotFoundError, match="prompt_token_ids"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(name, tmp_path):
    (folder_with(tmp_path) / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        Tokenizer(tmp_path)


def test_every_source_of_eos_counts(tmp_path, tokenizer):
    assert tokenizer.eos_ids == (SPECIAL["<|im_end|>"],)
    folder = folder_with(
        tmp_path,
        generation_config_json={"eos_token_id": [256, 260]},
        config_json={"eos_token_id": None, "text_config": {"eos_token_id": 7}},
        special_tokens_map_json={"eos_token": "<|im_start|>"},
    )
    assert Tokenizer(folder).eos_ids == (7, 256, 257, 260)
    folder_with(tmp_path, tokenizer_config_json={"eos_token": "<|im_end|>"})
    assert Tokenizer(folder).eos_ids == (7, 256, 258, 260)


def test_padding_and_truncation_of_training_are_off(tmp_path):
    settings = json.loads((folder_with(tmp_path) / "tokenizer.json").read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path).encode("long text") == list(b"long text")

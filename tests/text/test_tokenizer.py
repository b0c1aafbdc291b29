import json
import time

import pytest
from threads import ctrl_c_after
from tokenizer_folders import BYTES, folder_with

from jaxspec.text.tokenizer import SHRINKING, Tokenizer

UNICODE = "naïve 你好 🙂‍↔️ \u0301é \ufffd\x00\r\n end"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BYTES)


def test_text_survives_encoding(tokenizer):
    assert tokenizer.encode(UNICODE) == list(UNICODE.encode())
    assert tokenizer.decode(tokenizer.encode(UNICODE)) == UNICODE


def test_special_tokens_are_decoded_only_on_request(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids == [97, 258, 98]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_scripts_find_the_names_of_transformers(tokenizer):
    ids = tokenizer.encode("a<|im_end|>")
    assert tokenizer("a<|im_end|>").input_ids == ids
    both = tokenizer(["a", "bc"], add_special_tokens=False)
    assert both["input_ids"] == [[97], [98, 99]] and both.attention_mask == [[1], [1, 1]]
    vocabulary = tokenizer.get_vocab()
    assert len(tokenizer) == len(vocabulary) >= tokenizer.vocab_size
    assert vocabulary["<|im_end|>"] == 258
    assert tokenizer.convert_ids_to_tokens([258]) == ["<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(258) == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "unknown"]) == [258, None]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 258
    assert tokenizer.batch_decode([[97], [98, 258]]) == ["a", "b"]
    if tokenizer.eos_token is not None:
        assert vocabulary[tokenizer.eos_token] == tokenizer.eos_token_id
    assert (tokenizer.bos_token_id is None) == (tokenizer.bos_token is None)


def test_a_template_is_applied_as_in_transformers(tokenizer):
    chat = [{"role": "user", "content": "a"}]
    text = tokenizer.render_chat(chat, None, False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert tokenizer.apply_chat_template(chat) == tokenizer.encode(text, add_special_tokens=False)
    opened = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert opened == tokenizer.render_chat(chat) and opened.startswith(text) and opened != text
    assert tokenizer.apply_chat_template([chat, chat], tokenize=False) == [text, text]


def test_an_id_without_a_token_decodes_to_nothing(tokenizer):
    assert tokenizer.decode([97, 99_999, 98]) == "ab"


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


def test_chat_gives_the_ids_of_the_rendered_text(tokenizer):
    ids = tokenizer.chat([{"role": "user", "content": "a"}], enable_thinking=False)
    assert ids == [
        *(257, *b"user\n", *b"a", 258, *b"\n"),
        *(257, *b"assistant\n", 259, *b"\n\n", 260, *b"\n\n"),
    ]


def test_a_text_that_cannot_fit_is_refused_unread(tokenizer, monkeypatch):
    longest = len("<|im_start|>")
    most = SHRINKING * 10 * longest
    assert len(tokenizer.encode("a" * most, max_model_len=10)) == most  # which others refuse
    monkeypatch.setattr(tokenizer, "_tokenizer", None)  # so that nothing can be tokenized
    monkeypatch.setitem(vars(tokenizer), "_longest_token", longest)
    for text in ("a" * (most + 1), "é" * (most // 2 + 1), "a" * 10**8):
        started = time.perf_counter()
        with pytest.raises(ValueError) as caught:
            tokenizer.encode(text, max_model_len=10)
        assert time.perf_counter() - started < 1
        size = len(text.encode())
        for part in (f"too long: it has {size:,} bytes", "4 x 10 x 12 = 480", "max_model_len=10"):
            assert part in str(caught.value)


def test_no_text_that_fits_is_refused(tokenizer, tmp_path):
    """The longest tokens there are, in characters that NFC makes the most of."""
    normalizer = {"type": "NFC"}
    settings = json.loads((folder_with(tmp_path) / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings | {"normalizer": normalizer}))
    composing = Tokenizer(tmp_path)
    jamo = "\u1112\u1161\u11ab"  # 9 bytes, which NFC makes 3
    for one, text in ((tokenizer, "<|im_start|>" * 50), (composing, jamo * 50)):
        ids = one.encode(text)
        assert len(ids) == (50 if one is tokenizer else 150)
        assert one.encode(text, max_model_len=len(ids)) == ids


def test_a_long_text_has_the_same_ids_as_its_parts(tokenizer):
    text = UNICODE * 4000
    assert tokenizer.encode(text) == tokenizer.encode(UNICODE) * 4000
    assert len(text) > 2**16


def test_ctrl_c_ends_the_wait_for_a_long_text(tokenizer):
    with ctrl_c_after(0.1, heard_within=1):
        tokenizer.encode("abcd" * 800_000)  # takes half a second and more


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a", "A text to be tokenized must be a str, got b'a'."),
        ("ab\ud83d", "character 2 of this one is half of a surrogate pair, '.ud83d'."),
    ],
)
def test_what_is_no_text_is_refused(text, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [None]])
def test_what_is_no_id_is_refused(ids, tokenizer):
    with pytest.raises(ValueError, match=f"Token ids must be integers from 0 to {2**32 - 1}, got"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [RuntimeError, "panic"])
@pytest.mark.parametrize("method", ["encode", "decode"])
def test_an_error_of_the_library_names_the_tokenizer(method, kind, tokenizer, monkeypatch):
    class PanicException(BaseException):  # as pyo3's, which can't be imported
        pass

    class Broken:
        def __getattr__(self, name):
            raise (PanicException if kind == "panic" else kind)("index out of bounds" * 100)

    monkeypatch.setattr(tokenizer, "_tokenizer", Broken())
    with pytest.raises(ValueError, match="The tokenizer of .* fails on .*: index out of") as caught:
        getattr(tokenizer, method)("a" if method == "encode" else [1])
    assert len(str(caught.value)) < 1000


def test_errors_that_reach_clients_name_no_path(tmp_path):
    folder = folder_with(tmp_path)
    tokenizer = Tokenizer(folder)
    with pytest.raises(ValueError) as caught:
        tokenizer.chat([{"role": "user", "content": "a"}])
    assert folder.name in str(caught.value) and str(folder.parent) not in str(caught.value)

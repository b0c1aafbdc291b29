"""A checkpoint's files of tokens: what they say, and errors that name them."""

import os

import pytest
from tokenizer_folders import BYTES, folder_with

from jaxspec.text import tokenizer_files
from jaxspec.text.tokenizer import Tokenizer

SPECIAL = {"<|im_start|>": 257, "<|im_end|>": 258, "<think>": 259, "</think>": 260}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BYTES)


def test_a_folder_without_a_tokenizer_points_to_token_ids(tmp_path):
    with pytest.raises(FileNotFoundError, match="prompt_token_ids"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(name, tmp_path):
    (folder_with(tmp_path) / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        Tokenizer(tmp_path)


def test_the_end_token_is_the_one_that_the_settings_name(tmp_path, tokenizer):
    assert tokenizer.eos_ids == (SPECIAL["<|im_end|>"],)
    folder = folder_with(tmp_path, special_tokens_map_json={"eos_token": "<|im_start|>"})
    assert Tokenizer(folder).eos_ids == (257,)
    folder_with(tmp_path, tokenizer_config_json={"eos_token": "<|im_end|>"})
    assert Tokenizer(folder).eos_ids == (258,)
    folder_with(tmp_path, tokenizer_config_json={"eos_token": "no such token"})
    assert Tokenizer(folder).eos_ids == ()


SETTINGS = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"]
BAD = {
    "no JSON": b"{",
    "no UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "deep": b'{"a":' * 200_000,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "long": b" " * (2**24 + 1),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_of_another_kind_is_named(name, kind, tmp_path):
    (folder_with(tmp_path) / name).write_bytes(BAD[kind])
    with pytest.raises(ValueError, match=f"/{name} must ") as caught:
        Tokenizer(tmp_path)
    assert type(caught.value) is ValueError and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", [*SETTINGS, "tokenizer.json", "chat_template.jinja"])
def test_a_folder_or_a_pipe_in_a_files_place_is_named(name, tmp_path):
    path = folder_with(tmp_path) / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(ValueError, match=f"/{name} must be a .*file"):
        Tokenizer(tmp_path)
    path.rmdir()
    os.mkfifo(path)  # which would wait for a writer
    with pytest.raises(ValueError, match=f"/{name} must be a regular file"):
        Tokenizer(tmp_path)


def test_special_tokens_are_texts_and_the_rest_is_left_out(tmp_path):
    content = {"a_token": "a", "b_token": {"content": "b"}, "c_token": 3, "d_token": {}, "e": "e"}
    content |= {"f_token": "\ud800", "g_token": None}
    folder_with(tmp_path, special_tokens_map_json=content | {"g_token": "g", "b_token": "x"})
    assert tokenizer_files.special_tokens(tmp_path, content) == {
        "a_token": "a",
        "b_token": "b",
        "g_token": "g",
    }


@pytest.mark.parametrize("content", ["", "3", "{}", '{"model": 3}', "[" * 9999, "\x00"])
def test_a_tokenizer_that_the_library_refuses_is_named(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json must be one that `tokenizers` reads"):
        Tokenizer(tmp_path)


def test_a_tokenizer_of_more_than_so_many_bytes_is_refused(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(tokenizer_files.MAX_TOKENIZER_BYTES + 1)  # a hole, which takes no disk
    with pytest.raises(ValueError, match="at most 268,435,456 bytes, got 268,435,457"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("folder", [3, None, "", "a\0b", b"a"])
def test_a_folder_is_a_path(folder):
    with pytest.raises(ValueError, match="The folder of a tokenizer must be a "):
        Tokenizer(folder)


def entry(text, **flags):
    return {"content": text, "special": True, "lstrip": False, "normalized": False, **flags}


def test_tokens_that_only_the_settings_name_are_never_split(tmp_path):
    size = 264
    names = ["<|turn|>", "<|call|>", "<|new|>", "<|last|>"]
    folder = folder_with(
        tmp_path,
        added_tokens_json={names[1]: size + 1},
        tokenizer_config_json={
            "added_tokens_decoder": {str(size): entry(names[0])},
            "additional_special_tokens": [names[2], {"content": names[3]}, names[0]],
        },
    )
    found = Tokenizer(folder)
    assert found.encode("".join(names)) == [size, size + 1, size + 2, size + 3]
    assert found.decode([size, size + 1]) == names[1]  # the other one is special
    assert found.has_token(names[2]) and not found.has_token("<|none|>")


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens_json": {"<|turn|>": 10**6}},
        {"added_tokens_json": {"<|turn|>": "a"}},
        {"tokenizer_config_json": {"added_tokens_decoder": {"1000000": entry("<|turn|>")}}},
        {"tokenizer_config_json": {"added_tokens_decoder": {"a": entry("<|turn|>")}}},
        {"tokenizer_config_json": {"added_tokens_decoder": {"1": {"content": 3}}}},
        {"tokenizer_config_json": {"added_tokens_decoder": [3]}},
        {"tokenizer_config_json": {"added_tokens_decoder": {"9" * 5000: entry("<|turn|>")}}},
        {"tokenizer_config_json": {"additional_special_tokens": "<x>"}},
        {"tokenizer_config_json": {"extra_special_tokens": [5]}},
    ],
)
def test_an_added_token_with_a_wrong_id_is_named(files, tmp_path):
    with pytest.raises(ValueError, match="ownload"):
        Tokenizer(folder_with(tmp_path, **files))

"""Files that anybody may have written: no wait, no signal, no flood, and errors that say which."""

import os
import re

import pytest

from jaxspec import files
from jaxspec.files import fill, open_file, parse_json, read_json


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b'{"x": [1, 2.5, null]}')
    return path


def test_a_file_is_read_whole_through_a_link(path):
    link = path.with_name("link")
    link.symlink_to(path.name)
    assert read_json(link) == {"x": [1, 2.5, None]}


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (os.mkfifo, ValueError, "must be a regular file, and is a pipe, a socket or a device"),
        (os.mkdir, ValueError, "opening it failed: Is a directory"),
        (lambda path: path.symlink_to("/dev/null"), ValueError, "must be a regular file"),
        (lambda path: path.symlink_to("x"), FileNotFoundError, "and is a link to nothing"),
        (lambda path: path.symlink_to(path), ValueError, "opening it failed: Too many levels"),
        (lambda path: None, FileNotFoundError, "and is absent"),
    ],
)
def test_what_is_no_file_is_not_opened(tmp_path, make, kind, message):
    make(tmp_path / "x.json")
    with pytest.raises(kind, match=re.escape(f"{tmp_path / 'x.json'} must be a ")) as caught:
        open_file(tmp_path / "x.json")
    assert message in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # to root nothing is forbidden
    with pytest.raises(
        ValueError, match="file must be .* opening it failed: Permission denied. Ch"
    ):
        open_file(path)


def test_a_file_that_is_cut_short_or_fails_while_it_is_read_is_named(path, monkeypatch):
    with open_file(path) as file, pytest.raises(ValueError, match="file must stay .* cut short"):
        os.truncate(path, 3)
        fill(file, memoryview(bytearray(4)))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with (
        open_file(path) as file,
        pytest.raises(ValueError, match="file must be .* failed: Input/output error. Copy"),
    ):
        fill(file, memoryview(bytearray(4)))


def test_a_file_is_read_from_any_place_and_in_as_many_parts_as_the_system_gives(path, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, start: read(file, [into[0][:3]], start))
    content = bytearray(10)
    with open_file(path) as file:
        fill(file, memoryview(content), start=4)
    assert content == path.read_bytes()[4:14]


def test_a_file_that_is_too_long_is_not_read(path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 20)
    with pytest.raises(ValueError, match="file must be JSON of at most 20 bytes, got 21. Download"):
        read_json(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "it must be JSON, and is not: Expecting property name"),
        (b"\xff{}", "it must be JSON, and is not: 'utf-8' codec can't decode"),
        (b"[1]", "it must hold a JSON object, got list."),
        (b'{"a": {"x": 1, "y": 2, "x": 1}}', "is not: an object has the name 'x' 2 times."),
        (b'{"x":' * 10**5 + b"1" + b"}" * 10**5, "it must be JSON, and is nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_json(content, "it")


@pytest.mark.parametrize("host", ["git-lfs", "hawser"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.gguf", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named_as_such(name, host, tmp_path):
    pointer = f"version https://{host}.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 987654321\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ValueError, match="is a Git LFS pointer.*`git lfs pull`") as caught:
        open_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    (tmp_path / name).write_text(pointer + " " * 1024)  # too long for one
    open_file(tmp_path / name).close()

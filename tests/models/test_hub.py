"""Models of the hub: downloaded at a revision, checked against their digests, errors that help."""

import hashlib
import os
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled, filter_repo_objects

from jaxspec import LLM
from jaxspec.models import resolve_folder


def test_a_folder_resolves_to_itself(tmp_path):
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_a_gguf_file_resolves_to_itself_and_has_no_revisions(tmp_path, monkeypatch):
    path = tmp_path / "X.GGUF"
    path.touch()
    assert resolve_folder(path) == resolve_folder(str(path)) == path
    with pytest.raises(ValueError, match="X.GGUF is a file. Leave revision out"):
        resolve_folder(path, revision="main")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=f"the file {path} may not be read. Check its"):
        resolve_folder(path)


@pytest.mark.parametrize("shown", [False, True])
def test_the_hubs_own_bars_show_only_with_progress(tmp_path, monkeypatch, shown):
    bars = []

    def download(name, revision, allow_patterns, ignore_patterns):
        bars.append(not are_progress_bars_disabled())
        (tmp_path / "config.json").touch()
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_folder("some/model", shown) == tmp_path
    assert bars == [shown] and not are_progress_bars_disabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_weights_nobody_wants_are_not_downloaded(tmp_path, monkeypatch, wanted):
    patterns = []

    def download(name, revision, allow_patterns, ignore_patterns):
        patterns.extend(allow_patterns)
        (tmp_path / "config.json").touch()
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_folder("some/model", weights=wanted)
    assert ("*.safetensors" in patterns) == wanted and "*.json" in patterns


def test_weights_are_not_downloaded_in_a_second_layout(tmp_path, monkeypatch):
    """gpt-oss has other weights in subfolders, Mistral beside those of transformers."""
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["original/model.safetensors", "consolidated.safetensors", "metal/model.bin"]
    chosen = []

    def download(name, revision, **patterns):
        chosen.extend(filter_repo_objects([*files, *others], **patterns))
        (tmp_path / "config.json").touch()
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_folder("mistralai/Mistral-7B-v0.3")
    assert chosen == files


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RepositoryNotFoundError.__new__(RepositoryNotFoundError),
            "'some/model' is no folder here, and the hub has no such model, or not for you. Check "
            "the name; if the model is private or gated, log in with `hf auth login`.",
        ),
        (
            TimeoutError("The read timed out.\nmore"),
            "'some/model' is no folder here, and downloading it failed (TimeoutError: The read "
            "timed out). Try again, which keeps the files that came whole, or download the model "
            "another way and give its folder.",
        ),
    ],
)
def test_a_download_that_fails_says_why(monkeypatch, error, message):
    def download(name, revision, allow_patterns, ignore_patterns):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_folder("some/model")
    assert str(caught.value).endswith(f"such as Qwen/Qwen3.5-0.8B; {message}")


class Cache:
    """The hub's cache of one model, as `snapshot_download` leaves it."""

    def __init__(self, root):
        self.root = root / "models--some--model"
        self.folder = self.root / "snapshots" / ("c" * 40)
        self.folder.mkdir(parents=True)
        (self.root / "blobs").mkdir()
        self.revisions = []
        self.blobs = {
            "config.json": self.add("config.json", b"{}", large=False),
            "model.safetensors": self.add("model.safetensors", bytes(3_000_000), large=True),
        }

    def add(self, name, content, *, large):
        """A file under the digest that the hub gives: SHA-256 if it is large, else git's."""
        git = b"blob %d\0" % len(content)
        digest = hashlib.sha256(content) if large else hashlib.sha1(git + content)
        blob = self.root / "blobs" / digest.hexdigest()
        blob.write_bytes(content)
        (self.folder / name).symlink_to(Path("../../blobs") / blob.name)
        return blob

    def download(self, name, revision, allow_patterns, ignore_patterns):
        self.revisions.append(revision)
        return str(self.folder)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", cache.download)
    return cache


def test_a_repository_of_gguf_files_says_that_one_must_be_downloaded(cache):
    (cache.folder / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match="'some/model' has no config.json. If it holds GGUF"
    ):
        resolve_folder("some/model")


def test_a_revision_is_passed_to_the_hub(cache):
    for revision in (None, "main", "v1.0", "refs/pr/7", "c" * 40):
        assert resolve_folder("some/model", revision=revision) == cache.folder
        assert cache.revisions.pop() == revision


def test_what_was_downloaded_loads_without_the_network(tmp_path, monkeypatch):
    """By the hub's own library: the cache is as it would leave it."""
    cache = Cache(tmp_path)
    (cache.root / "refs").mkdir()
    (cache.root / "refs" / "v1").write_text(cache.folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision in ("v1", cache.folder.name):
        assert resolve_folder("some/model", revision=revision) == cache.folder
    with pytest.raises(FileNotFoundError, match="'some/model' at revision 'v2' .* was not downloa"):
        resolve_folder("some/model", revision="v2")
    cache.blobs["model.safetensors"].write_bytes(b"x")
    with pytest.raises(ValueError, match="model.safetensors must be what the hub holds"):
        resolve_folder("some/model", revision="v1")


@pytest.mark.parametrize("revision", ["", "../../x", "/x", "-x", "a b", "a\0", 7, "x" * 300])
def test_a_malformed_revision_is_refused_before_the_hub_is_asked(cache, revision):
    with pytest.raises(ValueError, match="revision must be the name of a branch or tag or the id"):
        resolve_folder("some/model", revision=revision)
    assert cache.revisions == []


def test_a_revision_is_for_hub_ids(tmp_path):
    with pytest.raises(ValueError, match=f"revision .* and {tmp_path} is a folder. Leave revision"):
        LLM(tmp_path, revision="main")
    with pytest.raises(ValueError, match="revision .* the embedded model has one. Leave revision"):
        LLM(revision="main")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RevisionNotFoundError, "'some/model' at revision 'v9' is no folder here, and the hub's "),
        (LocalEntryNotFoundError, "'some/model' at revision 'v9' is no folder here, was not down"),
    ],
)
def test_a_revision_that_is_not_there_is_named(monkeypatch, error, message):
    def download(name, revision, allow_patterns, ignore_patterns):
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=message):
        resolve_folder("some/model", revision="v9")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("change", ["cut", "changed"])
def test_a_file_that_is_not_what_the_hub_says_is_refused(cache, name, change):
    blob = cache.blobs[name]
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] if change == "cut" else content[:-1] + b"x")
    with pytest.raises(ValueError, match=f"{name} must be what the hub holds") as caught:
        resolve_folder("some/model")
    assert f"Delete {blob}, and load the model again" in str(caught.value)
    blob.write_bytes(content)  # as a new download does
    assert resolve_folder("some/model") == cache.folder


def test_a_digest_is_taken_once_until_the_file_changes(cache, monkeypatch):
    read, opened = hashlib.sha256, []
    monkeypatch.setattr(hashlib, "sha256", lambda: opened.append(digest := Counted()) or digest)

    class Counted:
        def __init__(self):
            self.size, self.digest = 0, read()

        def update(self, part):
            self.size += len(part)
            self.digest.update(part)

        def hexdigest(self):
            return self.digest.hexdigest()

    blob = cache.blobs["model.safetensors"]
    for _ in range(3):
        resolve_folder("some/model")
    assert [digest.size for digest in opened] == [3_000_000, 0, 0]
    os.utime(blob, ns=(0, 1))
    resolve_folder("some/model")
    assert opened[-1].size == 3_000_000
    os.truncate(blob, 10)
    with pytest.raises(ValueError, match=r"in place of \w{64} \(10 bytes\)"):
        resolve_folder("some/model")


def test_a_cache_that_others_own_is_checked_and_not_written_to(cache, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert resolve_folder("some/model") == cache.folder
    assert sorted(path.name for path in cache.root.iterdir()) == ["blobs", "snapshots"]
    cache.blobs["config.json"].write_bytes(b"[]")
    with pytest.raises(ValueError, match="config.json must be what the hub holds"):
        resolve_folder("some/model")


def test_files_of_unknown_digest_are_taken_as_they_are(cache):
    """Copies in place of links, and the names that mirrors of the hub give."""
    for name in ("tokenizer.json", "d41d8cd98f00b204e9800998ecf8427e-5"):
        (cache.root / "blobs" / name).write_bytes(b"{}")
    (cache.folder / "tokenizer.json").symlink_to("../../blobs/d41d8cd98f00b204e9800998ecf8427e-5")
    (cache.folder / "generation_config.json").write_bytes(b"{}")
    assert resolve_folder("some/model") == cache.folder


def test_weights_that_nobody_wants_are_not_digested(cache):
    cache.blobs["model.safetensors"].write_bytes(b"x")
    assert resolve_folder("some/model", weights=False) == cache.folder


def test_a_link_to_nothing_in_the_cache_is_named(cache):
    cache.blobs["model.safetensors"].unlink()
    with pytest.raises(FileNotFoundError, match=r"blobs/\w{64} must be a file, and is absent"):
        resolve_folder("some/model")


@pytest.mark.parametrize(
    "name", ["some model", "a/b/c", "../x/y", "x" * 5000, "~nobody/x", "a\0b", 7, ""]
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(name):
    with pytest.raises(
        (FileNotFoundError, ValueError), match="^A model must be a folder, a GGUF"
    ) as e:
        resolve_folder(name)
    assert len(str(e.value)) < 500


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # to root nothing is forbidden
    with pytest.raises(ValueError, match=f"the folder {tmp_path} may not be read. Check its"):
        resolve_folder(tmp_path)

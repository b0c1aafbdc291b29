"""What another user wrote, or can write, is refused; what is made is its user's alone."""

import os
import stat
import types
from pathlib import Path

import pytest

from jaxspec.runner.programs import own_files
from jaxspec.runner.programs.own_files import check_files, own_folder, read_own, write_own

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no such modes")


@pytest.fixture
def folder(tmp_path):
    """One of its user's own, which others can read."""
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    for made in (folder.parent, folder):
        made.chmod(0o755)
    return folder


@pytest.fixture
def give_away(monkeypatch):
    """Let a file belong to another user, as far as the checks can see."""

    def give(path):
        inode = path.lstat().st_ino
        monkeypatch.setattr(own_files, "_is_of_another", lambda status: status.st_ino == inode)

    return give


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_is_made_is_its_users_alone_whatever_the_umask(tmp_path, no_umask):
    folder = own_folder(tmp_path / "a" / "b" / "c")
    write_own(folder / "program", b"content")
    assert [mode(tmp_path / made) for made in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert mode(folder / "program") == 0o600
    assert read_own(folder / "program") == b"content"
    assert os.listdir(folder) == ["program"]


@pytest.mark.parametrize("bits", [0o700, 0o755, 0o711, 0o500])
def test_a_folder_that_others_cannot_write_is_used(folder, bits):
    folder.chmod(bits)
    assert own_folder(folder) == folder
    check_files(folder)


@pytest.mark.parametrize("bits", [0o775, 0o777, 0o757, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused(folder, bits):
    folder.chmod(bits)
    with pytest.raises(PermissionError, match=f"can write .*{bits:o}.*Delete it.*chmod -R go-w"):
        own_folder(folder)


@pytest.mark.parametrize("bits", [0o775, 0o777])
def test_a_folder_that_others_could_replace_is_refused(folder, bits):
    folder.parent.chmod(bits)
    with pytest.raises(PermissionError, match="above the folder .*`chmod go-w` on it"):
        own_folder(folder)
    folder.parent.chmod(bits | stat.S_ISVTX)  # as /tmp: nobody renames what others own
    assert own_folder(folder) == folder


def test_a_folder_of_another_user_is_refused(folder, give_away):
    give_away(folder)
    with pytest.raises(PermissionError, match=r"belongs to another user \(\d+\), who could put"):
        own_folder(folder)
    give_away(folder.parent)
    with pytest.raises(PermissionError, match="above the folder .*, belongs to another user"):
        own_folder(folder)


@pytest.mark.parametrize(
    ("owner", "user", "is_of_another"),
    [(1000, 1000, False), (0, 1000, False), (0, 0, False), (1000, 0, True), (1001, 1000, True)],
)
def test_the_user_and_root_are_trusted_and_root_trusts_root_alone(
    owner, user, is_of_another, monkeypatch
):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    status = types.SimpleNamespace(st_uid=owner)
    assert own_files._is_of_another(status) is is_of_another


def test_a_link_is_followed_once_and_what_it_leads_to_is_checked(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert own_folder(link) == folder  # so nobody can lead it elsewhere after the check
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can write .*above/cache"):
        own_folder(link)


@pytest.mark.parametrize("kind", ["a file", "a file above", "a dangling link", "a NUL", "too long"])
def test_what_can_be_no_folder_is_an_error_of_the_system(tmp_path, kind):
    place = tmp_path / "place"
    if kind.startswith("a file"):
        place.write_text("here")
    if kind == "a dangling link":
        place.symlink_to(tmp_path / "nowhere")
    name = {"a file above": "place/cache", "a NUL": "a\0b", "too long": "x" * 300}.get(
        kind, "place"
    )
    with pytest.raises((OSError, ValueError)):
        own_folder(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_others_can_write_is_not_read(folder, give_away):
    file = folder / "program"
    write_own(file, b"content")
    for bits in (0o620, 0o602, 0o666):
        file.chmod(bits)
        with pytest.raises(PermissionError, match=f"can be written by other users .*{bits:o}"):
            read_own(file)
    file.chmod(0o644)
    assert read_own(file) == b"content"
    give_away(file)
    with pytest.raises(PermissionError, match="belongs to another user"):
        read_own(file)


def test_neither_a_link_nor_a_pipe_is_read(folder):
    """A pipe without a writer would let the reader wait for ever."""
    write_own(folder / "other", b"content")
    (folder / "link").symlink_to("other")
    os.mkfifo(folder / "pipe", 0o600)
    for name in ("link", "pipe", "absent"):
        with pytest.raises(OSError):
            read_own(folder / name)


def test_files_that_others_can_write_are_found(folder, give_away):
    inner = folder / "xla_gpu_per_fusion_autotune_cache_dir"
    inner.mkdir(mode=0o755)
    files = folder / "jit_step-cache", inner / "tuned"
    for file in files:
        write_own(file, b"")
    check_files(folder)
    for file in files:
        file.chmod(0o666)
        with pytest.raises(PermissionError, match=f"{file.name}.* by other users .*Delete it"):
            check_files(folder)
        folder.chmod(0o700)  # others can't get at it
        check_files(folder)
        folder.chmod(0o755)
        file.chmod(0o600)
    give_away(files[1])
    with pytest.raises(PermissionError, match="tuned.* belongs to another user"):
        check_files(folder)


def test_a_link_among_the_files_is_found(folder):
    (folder / "jit_step-cache").symlink_to("/etc/hostname")
    with pytest.raises(PermissionError, match="jit_step-cache' is a link"):
        check_files(folder)


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    def fails(self, target):
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="the disk is full"):
        write_own(folder / "program", b"content")
    assert os.listdir(folder) == []


def test_messages_are_bounded(folder):
    deep = folder
    for _ in range(12):
        deep /= "y" * 200
    deep.mkdir(parents=True)
    deep.chmod(0o777)
    with pytest.raises(PermissionError) as refused:
        own_folder(deep)
    assert len(str(refused.value)) < 600


def test_nothing_is_checked_where_there_are_no_owners(folder, monkeypatch):
    """Windows: `os` has no `geteuid`, and modes are no protection."""
    folder.chmod(0o777)
    (folder / "program").write_bytes(b"content")
    (folder / "program").chmod(0o666)
    monkeypatch.delattr(os, "geteuid")
    assert own_folder(folder) == folder
    check_files(folder)
    assert read_own(folder / "program") == b"content"

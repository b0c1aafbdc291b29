"""Files of pieces: what is written is found again, and whatever fails costs no request."""

import contextlib
import logging
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

from jaxspec.plan.block_plan import Block, Key
from jaxspec.prefix import disk_tier
from jaxspec.prefix.disk_tier import DiskTier

PAGES = [((2, 3), np.dtype("float32")), ((2,), np.dtype("int32"))]
STATE = [((1, 3), np.dtype("float32")), ((4,), np.dtype("float8_e4m3fn"))]
KINDS = {False: PAGES, True: STATE}
A, B, C = (Key(bytes([number] * 32), (number, 1, 2, 3)) for number in range(3))
TAIL = Key(bytes(32), (7, 8))


def tier_of(folder, max_bytes=10**6, fingerprint="model", page_size=4, kinds=KINDS):
    tier = DiskTier(folder, max_bytes, fingerprint, page_size, kinds)
    settle(tier)
    return tier


def settle(tier):
    """Wait until the thread has nothing to do."""
    while tier._jobs:
        wait([tier._jobs[-1][0]])
        tier.poll()


def block_of(seed, *keys, is_state=False):
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 99, shape).astype(dtype) for shape, dtype in KINDS[is_state]]
    return Block(is_state=is_state, keys=keys, arrays=tuple(arrays))


def put(tier, block):
    tier.put(block)
    settle(tier)
    return block


def page(tier, key):
    return tier.index.find(key, is_state=False)


def load(tier, found):
    tier.want([found.block])
    assert tier.is_loading(found.block)
    assert tier.wait([found.block], 10)
    assert not tier.is_loading(found.block)
    return found.block.arrays


def check_equal(block, arrays):
    for want, got in zip(block.arrays, arrays, strict=True):
        assert want.dtype == got.dtype
        np.testing.assert_array_equal(want.view(np.uint8), got.view(np.uint8))


def test_what_was_written_is_read_by_this_engine_and_by_the_next_one(tmp_path):
    tier = tier_of(tmp_path)
    pages, state = put(tier, block_of(1, A, B)), put(tier, block_of(2, TAIL, is_state=True))
    for each in (tier, tier_of(tmp_path)):
        check_equal(pages, load(each, page(each, B)))
        check_equal(state, load(each, each.index.tail(TAIL.before, (7, 8, 9), 4)))
        assert page(each, B).place == 1 and each.stats()["num_read"] == 2
        assert each.stats()["num_bytes"] == sum(f.stat().st_size for f in tmp_path.iterdir())
        each.close()
    assert all(file.stat().st_mode & 0o77 == 0 for file in tmp_path.iterdir())


def test_what_is_there_is_not_written_again_and_what_is_not_wanted_leaves_the_memory(tmp_path):
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A, B))
    put(tier, block_of(1, A, B))
    put(tier, block_of(1, B))
    assert tier.stats()["num_written"] == 1 and len(list(tmp_path.iterdir())) == 1
    found = page(tier, A)
    arrays = load(tier, found)
    tier.want([])
    assert page(tier, A).block is not found.block  # whoever has the old one keeps its arrays
    assert page(tier, A).block.arrays is None and found.block.arrays is arrays


def test_files_go_that_were_used_longest_ago(tmp_path):
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A))
    size = tier.index.num_bytes
    tier.max_bytes = 2 * size + size // 2
    put(tier, block_of(2, B))
    load(tier, page(tier, A))
    put(tier, block_of(3, C))
    settle(tier)
    assert page(tier, B) is None and tier.stats()["num_evicted_files"] == 1
    assert len(list(tmp_path.iterdir())) == 2
    tier.close()
    again = tier_of(tmp_path, max_bytes=2 * size - 1)  # with less room: the older one goes
    settle(again)
    assert page(again, A) is None and page(again, C) is not None


def test_a_quota_of_nothing_keeps_nothing_and_fails_nothing(tmp_path):
    tier = tier_of(tmp_path, max_bytes=10)
    put(tier, block_of(1, A))
    settle(tier)
    assert not list(tmp_path.iterdir()) and page(tier, A) is None
    assert tier.stats()["num_failed"] == 0


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "another"},
        {"page_size": 8},
        {"kinds": {False: [((2, 4), np.dtype("float32"))], True: STATE}},
        {"kinds": {False: [((2, 3), np.dtype("float16")), PAGES[1]], True: STATE}},
    ],
)
def test_files_of_another_model_or_of_other_sizes_are_deleted_and_no_other_ones(tmp_path, other):
    put(tier_of(tmp_path), block_of(1, A))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights.piece").write_text("mine")
    tier = tier_of(tmp_path, **other)
    assert page(tier, A) is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", "weights.piece"]


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[-9] ^= 1
    elif how == "cut short":
        del content[-100:]
    elif how == "another version":
        content[8] += 1
    elif how == "empty":
        content.clear()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["a bit", "cut short", "another version", "empty", "gone"])
def test_a_damaged_file_is_not_used_and_deleted(tmp_path, how, caplog):
    """Whether it was damaged while the engine ran, or before."""
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A))
    (path,) = tmp_path.iterdir()
    path.unlink() if how == "gone" else damaged(path, how)
    with caplog.at_level(logging.WARNING):
        assert load(tier, page(tier, A)) is None
    settle(tier)
    assert page(tier, A) is None and not list(tmp_path.iterdir())
    assert tier.stats()["num_failed"] == 1 and len(caplog.records) == 1
    put(tier, block_of(1, A))
    (path,) = tmp_path.iterdir()
    path.unlink() if how == "gone" else damaged(path, how)
    tier.close()
    again = tier_of(tmp_path)
    if page(again, A) is not None:  # the checksum is looked at when it is used
        assert how == "a bit" and load(again, page(again, A)) is None
    settle(again)
    assert page(again, A) is None and not list(tmp_path.iterdir())


def test_files_that_swapped_their_places_are_not_used(tmp_path):
    tier = tier_of(tmp_path)
    first, second = put(tier, block_of(1, A)), put(tier, block_of(2, B))
    one, other = (tmp_path / tier._names[page(tier, key).block] for key in (A, B))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    tier.want([page(tier, A).block])
    settle(tier)
    assert page(tier, A) is None and not one.exists() and tier.num_failed == 1
    later = tier_of(tmp_path)  # which finds the other file by its contents
    check_equal(first, load(later, page(later, A)))
    assert page(later, B) is None and second.arrays is not None


def test_a_disk_that_is_full_is_told_once_and_counted(tmp_path, caplog, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    tier = tier_of(tmp_path)
    monkeypatch.setattr(disk_tier.Container, "save", full)
    with caplog.at_level(logging.WARNING):
        for seed, key in enumerate((A, B, C)):
            put(tier, block_of(seed, key))
    assert tier.stats()["num_failed"] == 3 and len(caplog.records) == 1
    assert "No space left" in caplog.text and len(tier.index.blocks) == 0
    monkeypatch.undo()
    put(tier, block_of(1, A))
    assert page(tier, A) is not None


def test_a_folder_that_goes_fails_nothing(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    tier = tier_of(folder)
    put(tier, block_of(1, A))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert load(tier, page(tier, A)) is None
    put(tier, block_of(1, A))
    tier.clear()
    settle(tier)
    assert tier.stats()["num_failed"] >= 2
    assert tier_of(folder).stats()["num_failed"] == 1


def test_a_disk_that_is_too_slow_gets_no_more_than_some_pieces(tmp_path, monkeypatch):
    tier, jobs = tier_of(tmp_path), []
    monkeypatch.setattr(tier._thread, "submit", lambda act: jobs.append(act) or Waiting())
    for number in range(12):
        tier.put(block_of(number, Key(bytes([number] * 32), (1, 2, 3, 4))))
    assert len(jobs) == disk_tier.MAX_WAITING == 12 - tier.stats()["num_skipped"]
    tier.put(block_of(0, Key(bytes(32), (1, 2, 3, 4))))  # it waits already
    assert len(jobs) == disk_tier.MAX_WAITING


class Waiting:
    def done(self):
        return False


@contextlib.contextmanager
def busy(tier):
    """The tier's thread has something to do, until the block ends."""
    over = threading.Event()
    job = tier._thread.submit(over.wait)
    while not job.running():
        time.sleep(1e-3)
    try:
        yield
    finally:
        over.set()


def paths_of(tmp_path):
    return sorted(file.name for file in tmp_path.iterdir())


def test_who_waits_too_long_goes_on_without_the_file_that_is_read_and_keeps_the_others(
    tmp_path, monkeypatch
):
    tier, over = tier_of(tmp_path), threading.Event()
    for seed, key in enumerate((A, B, C)):
        put(tier, block_of(seed, key))
    blocks = [page(tier, key).block for key in (A, B, C)]
    monkeypatch.setattr(disk_tier, "read", lambda *given: over.wait(20) and ())
    tier.want(blocks[:2], blocks)
    while not tier._loading[blocks[0]].running():
        time.sleep(1e-3)
    assert not tier.wait(blocks[:2], 0.0)
    over.set()
    monkeypatch.undo()
    assert page(tier, A) is None and len(paths_of(tmp_path)) >= 2
    assert tier.stats()["num_failed"] == 1
    tier.want([])
    settle(tier)
    assert len(paths_of(tmp_path)) == 2
    for key, seed in ((B, 1), (C, 2)):
        check_equal(block_of(seed), load(tier, page(tier, key)))


def test_who_waits_waits_for_its_own_pieces_alone(tmp_path):
    tier = tier_of(tmp_path)
    for seed, key in enumerate((A, B)):
        put(tier, block_of(seed, key))
    first, later = (page(tier, key).block for key in (A, B))
    with busy(tier):
        tier.want([first])
    wait([tier._loading[first]])
    with busy(tier):
        tier.want([first, later])
        assert tier.wait([first], 60)  # though the thread is not free for the other one
        assert first.arrays is not None and tier.is_loading(later)


def test_what_nobody_wants_any_more_is_not_read(tmp_path):
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A))
    block = page(tier, A).block
    with busy(tier):
        tier.want([block])
        tier.want([])
    settle(tier)
    assert tier.stats()["num_read"] == 0 == tier.stats()["num_failed"]
    assert page(tier, A).block is block


def test_no_more_is_read_ahead_than_its_bound(tmp_path, monkeypatch):
    """What the next request needs is read whatever its size."""
    tier = tier_of(tmp_path)
    keys = [Key(bytes([number] * 32), (number, 1, 2, 3)) for number in range(6)]
    for seed, key in enumerate(keys):
        put(tier, block_of(seed, key))
    monkeypatch.setattr(disk_tier, "MAX_AHEAD_BYTES", 2 * tier.index.num_bytes // 6)
    blocks = [page(tier, key).block for key in keys]
    for _ in range(2):
        tier.want(blocks[:3], blocks)
        settle(tier)
        assert [block.arrays is not None for block in blocks] == [True] * 5 + [False]
    assert tier.stats()["num_read"] == 5 and tier.is_loading(blocks[5])
    assert tier.wait([blocks[5]], 10) and blocks[5].arrays is not None


def test_what_is_written_in_place_of_a_file_of_that_name_stays_when_the_older_one_goes(tmp_path):
    """A file of which the index has lost a page is written anew, under its name."""
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A, B))
    old = page(tier, A).block
    put(tier, block_of(2, B, C))
    tier._drop(page(tier, C).block)
    assert page(tier, B) is None  # with the newer piece, though the older one has it as well
    put(tier, block_of(1, A, B))
    assert tier.stats()["num_files"] == 1 and old not in tier.index.blocks
    assert tier.stats()["num_bytes"] == sum(f.stat().st_size for f in tmp_path.iterdir())
    tier._drop(old)
    settle(tier)
    check_equal(block_of(1), load(tier, page(tier, A)))
    with busy(tier):  # and if it goes while that is written
        block = page(tier, A).block
        tier.index.remove(block)
        tier.put(block_of(1, A, B))
        tier.index.add(block, 0)
        assert tier._names[block] in tier._writing
        tier._drop(block)
    settle(tier)
    check_equal(block_of(1), load(tier, page(tier, A)))


def test_a_full_folder_is_closed_like_any_other(tmp_path):
    """What is written last makes others go, which is asked of the thread as well."""
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A))
    tier.max_bytes = tier.index.num_bytes * 3 // 2
    tier.put(block_of(2, B))
    tier.close()
    assert len(paths_of(tmp_path)) == 1 and tier.stats()["num_evicted_files"] == 1


def test_clear_deletes_what_is_there_and_what_is_on_its_way(tmp_path):
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A))
    tier.put(block_of(2, B))
    tier.clear()
    settle(tier)
    assert not list(tmp_path.iterdir()) and page(tier, B) is None and tier.index.num_bytes == 0
    put(tier, block_of(3, C))
    assert page(tier, C) is not None and tier.stats()["num_files"] == 1


def test_a_stranger_s_header_is_believed_nothing(tmp_path):
    tier = tier_of(tmp_path)
    put(tier, block_of(1, A))
    (path,) = tmp_path.iterdir()
    arrays = {str(i): array for i, array in enumerate(block_of(1).arrays)}
    for about in (
        {},
        {"keys": 3, "is_state": False},
        {"keys": [["zz", [1]]], "is_state": False},
        {"keys": [["00", [1, 2, 3, 4, 5]]], "is_state": False},
        {"keys": [["00", [[1]]]], "is_state": False},
        {"keys": [], "is_state": False},
    ):
        disk_tier.Container(disk_tier.KIND, about, arrays).save(path)
        assert len(tier_of(tmp_path).index.blocks) == 0 and not path.exists()


def test_a_piece_that_leaves_before_it_is_filled_is_written_once_it_is(tmp_path):
    """And never, if the plan that fills it is not dispatched any more."""
    tier, arrays = tier_of(tmp_path), block_of(1).arrays
    blocks = [put(tier, Block(is_state=False, keys=[key])) for key in (A, B)]
    assert not list(tmp_path.iterdir())
    blocks[0].arrays = arrays
    tier.poll()
    settle(tier)
    check_equal(blocks[0], load(tier, page(tier, A)))
    tier.forget_unfilled()
    blocks[1].arrays = arrays
    settle(tier)
    assert page(tier, B) is None and not tier._writing


# The functions of files by themselves.

OWN = "0" * 32
NAME = f"{OWN}-{'1' * 32}.piece"
LIKE = [((2,), np.dtype("float32"))]


BLOCK = Block(is_state=False, keys=(A,), arrays=(np.ones(2, "f"),))


def write(folder, name=NAME):
    return disk_tier.write(folder / name, BLOCK)


def test_what_is_written_is_found_and_read(tmp_path):
    num_bytes = write(tmp_path)
    ((*found, block),) = disk_tier.scan(tmp_path, OWN, 4)
    assert (found, block.is_state, block.keys) == ([NAME, num_bytes], False, (A,))
    np.testing.assert_array_equal(disk_tier.read(tmp_path / NAME, BLOCK, LIKE)[0], [1, 1])
    with pytest.raises(ValueError, match="of a piece of this engine"):
        disk_tier.read(tmp_path / NAME, BLOCK, [*LIKE, *LIKE])


def test_the_part_that_a_killed_process_left_is_deleted(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", killed)
        patch.setattr("pathlib.Path.unlink", lambda self, missing_ok: None)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    (tmp_path / ".notes.part").write_text("mine")
    assert len(list(tmp_path.iterdir())) == 2
    assert disk_tier.scan(tmp_path, OWN, 4) == []
    assert [path.name for path in tmp_path.iterdir()] == [".notes.part"]


def test_all_of_an_engine_are_deleted_and_no_others(tmp_path):
    other = NAME.replace("0", "2")
    write(tmp_path), write(tmp_path, other)
    disk_tier.delete_all(tmp_path, OWN)
    assert [path.name for path in tmp_path.iterdir()] == [other]


def test_a_file_that_can_t_be_deleted_hides_no_other(tmp_path):
    write(tmp_path)
    (tmp_path / f".{NAME}.part").mkdir()
    (tmp_path / f"{OWN}-{'2' * 32}.piece").mkdir()
    assert [name for name, *_ in disk_tier.scan(tmp_path, OWN, 4)] == [NAME]


def renewed(tier):
    """Files of earlier weights go; later ones have the names of others."""
    put(tier, block_of(1, A))
    before = {path.name for path in tier._folder.iterdir()}
    tier.clear()
    tier.rename("other weights")
    settle(tier)
    assert not list(tier._folder.iterdir()) and page(tier, A) is None
    put(tier, block_of(2, A))
    after = {path.name for path in tier._folder.iterdir()}
    assert len(before) == len(after) == 1 and not before & after
    tier.close()


def test_files_are_those_of_the_weights(tmp_path):
    renewed(tier_of(tmp_path))
    assert page(tier_of(tmp_path), A) is None  # deleted, as those of any other model
    assert page(tier_of(tmp_path, fingerprint="other weights"), A) is None


@pytest.mark.parametrize("bug", ["clear", "rename"])
def test_files_of_earlier_weights_are_seen(bug, tmp_path, monkeypatch):
    monkeypatch.setattr(DiskTier, bug, lambda self, fingerprint=None: None, raising=True)
    if bug == "rename":  # the constructor uses it, too
        monkeypatch.setattr(DiskTier, "_own", "0" * 32, raising=False)
    with pytest.raises(AssertionError):
        renewed(tier_of(tmp_path))

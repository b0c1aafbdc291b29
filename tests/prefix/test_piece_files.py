"""What a folder has of pieces; how the tier uses it is in test_disk_tier.py."""

import numpy as np
import pytest

from jaxspec.plan.block_plan import Block
from jaxspec.prefix import disk_tier
from jaxspec.prefix.block_index import Key

OWN, KEY = "0" * 32, Key(bytes(32), (1, 2))
NAME = f"{OWN}-{'1' * 32}.piece"
LIKE = [((2,), np.dtype("float32"))]


def write(folder, name=NAME):
    block = Block(is_state=False, arrays=(np.ones(2, "f"),))
    return disk_tier.write(folder / name, block, [KEY])


def test_what_is_written_is_found_and_read(tmp_path):
    num_bytes = write(tmp_path)
    assert disk_tier.scan(tmp_path, OWN, 4) == [disk_tier.BlockFile(NAME, num_bytes, False, (KEY,))]
    np.testing.assert_array_equal(disk_tier.read(tmp_path / NAME, LIKE)[0], [1, 1])
    with pytest.raises(ValueError, match="of a piece of this engine"):
        disk_tier.read(tmp_path / NAME, [*LIKE, *LIKE])


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
    assert [file.name for file in disk_tier.scan(tmp_path, OWN, 4)] == [NAME]

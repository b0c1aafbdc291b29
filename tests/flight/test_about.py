"""What tells a checkpoint from others."""

import shutil

from harness import FIXTURES

from jaxspec.flight.about import digest_of


def test_another_config_or_other_weights_are_another_checkpoint(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3", folder)
    digests = {digest_of(folder)}
    assert digests == {digest_of(FIXTURES / "qwen3")}
    (folder / "README.md").write_text("a file that no model reads")
    assert digests == {digest_of(folder)}
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    digests.add(digest_of(folder))
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    digests.add(digest_of(folder))
    assert len(digests) == 3

"""What a flight says of its engine, and what tells a checkpoint from others."""

import json
import shutil
from pathlib import Path

import pytest
from gguf_files import write_gguf
from harness import FIXTURES
from walks import HostWalk, Walk

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.flight.about import about, check_processors, check_speculation, digest_of
from jaxspec.options.engine_options import EngineConfig


def test_a_hub_id_is_written_as_it_was_given():
    config = EngineConfig(Path("some/model"), compilation_cache="/a", seed=3)
    told = about(config, FIXTURES / "qwen3", 264)
    assert told["options"]["model"] == "some/model" and told["options"]["seed"] == 3
    assert "compilation_cache" not in told["options"] and json.loads(json.dumps(told)) == told


def test_logits_processors_are_named_and_not_replayed():
    config = EngineConfig(None, logits_processors=[Walk(), HostWalk, "walks:Late"])
    told = about(config, FIXTURES / "qwen3", 264)["options"]["logits_processors"]
    assert told == ["walks:Walk", "walks:HostWalk", "walks:Late"]
    with pytest.raises(ValueError, match="replayed without logits processors.*walks:Walk"):
        check_processors(told)
    check_processors(about(EngineConfig(), FIXTURES / "qwen3", 264)["options"]["logits_processors"])


def test_another_config_or_other_weights_are_another_checkpoint(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3", folder)
    digests = {digest_of(folder)}
    assert digests == {digest_of(FIXTURES / "qwen3")}
    (folder / "README.md").write_text("a file that no model reads")
    (folder / "folder.safetensors").mkdir()
    (folder / "link.safetensors").symlink_to("nothing")
    assert digests == {digest_of(folder)}
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    digests.add(digest_of(folder))
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    digests.add(digest_of(folder))
    assert len(digests) == 3


def test_a_gguf_file_is_told_from_others(tmp_path):
    one, other = (write_gguf("llama", tmp_path / f"{kind}.gguf", kind) for kind in ("F32", "F16"))
    digests = {digest_of(one), digest_of(other), digest_of(FIXTURES / "llama")}
    assert len(digests) == 3
    assert digest_of(one.rename(tmp_path / "other name.gguf")) in digests


def test_a_drafters_checkpoint_must_lie_here(tmp_path):
    def told(model):
        return {"method": "draft_model", "options": {"model": model, "revision": None}}

    (tmp_path / "x.gguf").touch()
    check_speculation(told(str(tmp_path)))
    check_speculation(told(str(tmp_path / "x.gguf")))
    check_speculation("auto")
    for model in ("some/model", str(tmp_path / "gone"), 3):
        with pytest.raises(ValueError, match="drafter's checkpoint that lies here, and it was rec"):
            check_speculation(told(model))


def test_a_drafter_is_told_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "drafter").mkdir()
    monkeypatch.chdir(tmp_path)
    speculation = {"method": "draft_model", "model": Path("drafter")}
    config = EngineConfig.of(None, {"speculative_config": speculation})
    options = json.loads(json.dumps(about(config, EMBEDDED_MODEL, 9)["options"]))
    assert options["speculative_config"]["options"]["model"] == str(tmp_path / "drafter")

"""The page that does speculative steps by hand: what it prints, and that its check can fail."""

import importlib.util
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

PAGE = Path(__file__).parents[2] / "notebooks" / "one_step.py"


@pytest.fixture
def page():
    spec = importlib.util.spec_from_file_location("one_step", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "valid"),
    [
        ("snapshot", "state_offset 2"),
        ("replay", "ring_length 6"),
    ],
)
def test_its_tokens_equal_plain_decoding(page, policy, valid, capsys):
    page.main(policy)
    printed = capsys.readouterr().out
    assert printed.endswith("All tokens equal those of plain greedy decoding.\n")
    assert "2 accepted, 1 rejected" in printed and valid in printed
    assert "prev_positions [1, -1]" in printed  # a row moves up, and another enters


@pytest.mark.soak
def test_its_check_fails_without_the_rollback(page, monkeypatch):
    def at_the_last_candidate(*args):
        rows = update(*args)
        return rows.with_fields(state_offset=jnp.full_like(rows.state_offset, 3))

    update = page.update
    monkeypatch.setattr(page, "update", at_the_last_candidate)
    with pytest.raises(SystemExit, match="Plain greedy decoding gives"):
        page.main("snapshot")


def test_it_is_short_and_uses_public_names(page):
    text = PAGE.read_text()
    assert text.count("\n") <= 150
    assert not re.findall(r"\bimport _|\._[a-z]", text)
    assert callable(page.main)  # all its imports exist

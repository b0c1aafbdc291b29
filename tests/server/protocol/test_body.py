"""What all bodies share: JSON's types, and names that are nearly right."""

import pytest
from pydantic import ValidationError

from jaxspec.server.protocol import Body, Each


class Example(Body):
    top_k: int | None = None
    ids: Each[int] | None = None


def test_values_keep_their_types():
    assert Example(top_k=3).top_k == 3
    for wrong in ("3", 3.0, True, [3]):
        with pytest.raises(ValidationError):
            Example(top_k=wrong)


def test_unknown_names_are_passed_over_and_misspelt_ones_are_not():
    assert Example.model_validate({"seen_by": 1, "": 2, "x" * 10**6: 3}).top_k is None
    with pytest.raises(ValidationError, match="no field 'topk'; the nearest is 'top_k'"):
        Example.model_validate({"topk": 1})


def test_a_long_list_has_one_fault():
    with pytest.raises(ValidationError) as caught:
        Example(ids=["x"] * 1000)
    assert caught.value.error_count() == 1


def test_few_unknown_names_are_compared_and_many_are_refused(monkeypatch):
    """Comparing takes the event loop's time."""
    compared = []
    monkeypatch.setattr("difflib.get_close_matches", lambda name, *how: compared.append(name) or [])
    Example.model_validate({f"seen by {number}": 1 for number in range(100)})
    assert len(compared) == 32
    with pytest.raises(ValidationError, match="101 unknown fields, such as 'seen by 0'"):
        Example.model_validate({f"seen by {number}": 1 for number in range(101)})
    assert len(compared) == 32

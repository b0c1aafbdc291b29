"""Ids: each its own, behind what it is an id of."""

from jaxspec.server.translate.fields import new_id


def test_ids_differ():
    found = {new_id("cmpl-") for _ in range(100)}
    assert len(found) == 100
    assert all(each.startswith("cmpl-") and len(each) == len("cmpl-") + 32 for each in found)

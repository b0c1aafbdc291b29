"""New values of leaves: tensors of later ones are on their way while a value is made."""

import pytest

from jaxspec.models.trees import filling
from jaxspec.models.trees.filling import Begun, Filling


class Recorder:
    """Makers that record what happens; `sizes` are the bytes of their tensors."""

    def __init__(self, sizes):
        self.events, self.in_flight, self.most = [], 0, 0
        self.makers = {index: self._maker(index, size) for index, size in enumerate(sizes)}

    def _maker(self, index, size):
        recorder = self

        class Maker:
            num_bytes = size

            def begin(self, before):
                recorder.events.append(("begin", index, before))
                recorder.in_flight += size
                recorder.most = max(recorder.most, recorder.in_flight)
                return Begun(lambda: recorder._make(index, size), size)

        return Maker()

    def _make(self, index, size):
        self.events.append(("make", index))
        self.in_flight -= size
        return f"value {index}"


@pytest.mark.parametrize("sizes", [[0] * 9, [3] * 9, [50, 1, 1, 50, 1], [1], []])
def test_values_have_the_order_of_leaves_and_few_tensors_are_in_flight(monkeypatch, sizes):
    monkeypatch.setattr(filling, "_MOST_IN_FLIGHT", 10)
    monkeypatch.setattr(filling, "_MOST_BEGUN", 4)
    recorder = Recorder(sizes)
    values = Filling({}, recorder.makers).values(lambda index: f"before {index}")
    assert list(values) == [(index, f"value {index}") for index in range(len(sizes))]
    begun = [event[1:] for event in recorder.events if event[0] == "begin"]
    assert begun == [(index, f"before {index}") for index in range(len(sizes))]
    assert recorder.most <= max(10, *sizes, 0)


def test_tensors_of_later_leaves_are_copied_while_a_value_is_made(monkeypatch):
    monkeypatch.setattr(filling, "_MOST_IN_FLIGHT", 10)
    recorder = Recorder([4] * 9)
    values = iter(Filling({}, recorder.makers).first_values())
    next(values)
    events = [event[:2] for event in recorder.events]
    assert events == [("begin", 0), ("begin", 1), ("make", 0)]

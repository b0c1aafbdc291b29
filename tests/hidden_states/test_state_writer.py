import logging
import threading

import numpy as np

from jaxspec.hidden_states import recorder
from jaxspec.hidden_states.recorder import StateWriter
from jaxspec.hidden_states.state_file import SampleStates


def sample(name):
    states = [np.zeros((1, 4, 2), np.float32)]
    return SampleStates(name, 0, 1, (1, 2), "stop", states)


def test_closing_waits_for_all_writes():
    may_write, written = threading.Event(), []

    def write(saved):
        may_write.wait()
        written.append(saved.request_id)

    writer = StateWriter(write)
    for name in "abc":
        writer.put(sample(name))
    assert writer.stats()["num_waiting"] == 3 and not written
    threading.Timer(0.1, may_write.set).start()
    writer.close()
    writer.close()
    assert written == ["a", "b", "c"]
    want = {"num_saved": 3, "num_waiting": 0, "num_failed": 0, "missing": []}
    assert writer.stats() == want


def test_what_cannot_be_written_is_told_and_the_rest_is_written(caplog):
    def write(saved):
        if saved.request_id != "b":
            raise OSError(28, "No space left on device")

    writer = StateWriter(write)
    for name in "abcd":
        writer.put(sample(name))
    with caplog.at_level(logging.ERROR):
        writer.close()
        writer.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert "those of request 'a', sample 0, could not be written" in first
    assert "No space left on device" in first and "Generation goes on" in first
    names = "a-0.safetensors, c-0.safetensors, d-0.safetensors"
    assert last == f"hidden states: 3 of 4 files could not be written: {names}"
    figures = writer.stats()
    assert (figures["num_saved"], figures["num_failed"]) == (1, 3)
    assert ", ".join(figures["missing"]) == names


def test_names_are_told_in_bounds(monkeypatch, caplog):
    monkeypatch.setattr(recorder, "MAX_NAMES", 11)

    def write(saved):
        raise OSError("no")

    writer = StateWriter(write)
    for number in range(13):
        writer.put(sample(str(number)))
    writer.close()
    assert writer.num_failed == 13 and len(writer.missing) == 11
    assert caplog.records[-1].getMessage().endswith("9-0.safetensors and 3 more")


def test_a_slow_disk_bounds_what_the_host_holds(monkeypatch):
    size = sample("a").num_bytes
    monkeypatch.setattr(recorder, "MAX_BYTES", 2 * size)
    most, writer = [], None

    def write(saved):
        most.append(writer.stats()["num_waiting"])

    writer = StateWriter(write)
    for number in range(20):
        writer.put(sample(str(number)))
    writer.close()
    assert len(most) == 20 and max(most) <= 2
    monkeypatch.setattr(recorder, "MAX_BYTES", size - 1)  # one alone goes all the same
    alone = StateWriter(lambda saved: None)
    alone.put(sample("a"))
    alone.close()
    assert alone.num_saved == 1

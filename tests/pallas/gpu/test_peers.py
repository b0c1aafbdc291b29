"""Whether GPUs reach each other, asked of a driver that is not there."""

import ctypes
from types import SimpleNamespace

import pytest

from jaxspec.pallas.gpu import peers

DEVICES = [SimpleNamespace(local_hardware_id=ordinal) for ordinal in (0, 3, 5)]


class Driver:
    """CUDA's driver, whose handles are ordinals plus 100."""

    def __init__(self, reached, fails=()):
        self.reached, self.fails = reached, fails

    def cuDeviceGet(self, handle, ordinal):  # noqa: N802
        handle._obj.value = ordinal.value + 100
        return 101 if ordinal.value in self.fails else 0

    def cuDeviceCanAccessPeer(self, found, reader, owner):  # noqa: N802
        found._obj.value = (reader.value - 100, owner.value - 100) in self.reached
        return 0


ALL = {(0, 3), (3, 0), (0, 5), (5, 0), (3, 5), (5, 3)}


@pytest.mark.parametrize(
    ("driver", "expected"),
    [(Driver(ALL), True), (Driver(ALL - {(5, 3)}), False), (Driver(ALL, fails=[3]), False)],
)
def test_all_pairs_must_reach_each_other(monkeypatch, driver, expected):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert peers.all_reach_each_other(DEVICES) is expected


def test_without_a_driver_none_do(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert peers.all_reach_each_other(DEVICES) is False

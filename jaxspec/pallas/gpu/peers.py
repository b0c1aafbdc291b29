"""GPUs of a process that read and write each other's memory."""

import ctypes
import itertools
from collections.abc import Iterable
from typing import Any

from jaxspec.device import StandIn


def all_reach_each_other(devices: Iterable[Any]) -> bool:
    """Return whether each GPU can access the memory of all others; False without CUDA's driver.

    XLA enables the access where it is possible.
    """
    devices = tuple(devices)
    if any(isinstance(each, StandIn) for each in devices):  # GPUs of another process
        return False
    ordinals = [device.local_hardware_id for device in devices]
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return all(_reaches(cuda, *pair) for pair in itertools.permutations(ordinals, 2))


def _reaches(cuda: ctypes.CDLL, reader: int, owner: int) -> bool:
    found = ctypes.c_int(0)
    pair = [ctypes.c_int(-1), ctypes.c_int(-1)]
    for handle, ordinal in zip(pair, (reader, owner), strict=True):
        if cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(ordinal)):
            return False
    failed = cuda.cuDeviceCanAccessPeer(ctypes.byref(found), *pair)
    return not failed and found.value == 1

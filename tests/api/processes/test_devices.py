"""The GPUs of each replica: a part of those that this process sees."""

import jax
import pytest

from jaxspec.api.processes import devices
from jaxspec.api.processes.devices import environments, slices, visible


@pytest.mark.parametrize(
    "value, found",
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        (" 1 , 0", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),
        ("1,7,2", ["1"]),  # there is no 7, and CUDA stops there
        ("GPU-8932f937,MIG-GPU-1/2/0", ["GPU-8932f937", "MIG-GPU-1/2/0"]),
        ("NoDevFiles", []),
    ],
)
def test_what_cuda_sees(value, found):
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible(environment, 4) == found


def test_each_replica_has_a_slice():
    assert slices(["4", "5", "6", "7", "8"], 2, 2) == [["4", "5"], ["6", "7"]]
    assert slices(["a", "b"], 2, 1) == [["a"], ["b"]]


def test_too_few_gpus_are_refused_with_all_numbers():
    with pytest.raises(ValueError) as caught:
        slices(["5", "6", "7"], 2, 2)
    for part in ("data_parallel_size=2", "tensor_parallel_size=2", "4 GPUs", "3 are", "5, 6, 7"):
        assert part in str(caught.value)


def test_processes_on_gpus_see_their_own_and_those_on_a_cpu_have_devices_of_their_own(monkeypatch):
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.setattr(devices, "_CUDA_PLUGINS", ("json",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        found = environments(3, 1)
        assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["1", "2", "3"]
        with pytest.raises(ValueError, match="needs 4 GPUs"):
            environments(2, 2)
        monkeypatch.setattr(devices, "_CUDA_PLUGINS", ())
        found = environments(2, 3)
        assert [each["JAX_NUM_CPU_DEVICES"] for each in found] == ["3", "3"]
        jax.config.update("jax_platforms", "cpu")
        assert {each["JAX_PLATFORMS"] for each in environments(2, 1)} == {"cpu"}
    finally:
        jax.config.update("jax_platforms", before)


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr(devices.ctypes, "CDLL", no_driver)
    assert devices.count_gpus() == 0

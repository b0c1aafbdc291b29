"""The devices of each replica, chosen by environment variables without initializing CUDA."""

import ctypes
import importlib.util
import os
from collections.abc import Mapping

import jax

_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(num_replicas: int, num_devices: int) -> list[dict[str, str]]:
    """Return the environment of each replica's process, which selects its devices.

    Args:
        num_replicas: Number of replicas.
        num_devices: Devices of each.

    Raises:
        ValueError: this process sees fewer GPUs than the replicas need together.
    """
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    own = dict(os.environ) | ({"JAX_PLATFORMS": platforms} if platforms else {})
    num_gpus = count_gpus() if any(map(importlib.util.find_spec, _CUDA_PLUGINS)) else 0
    is_gpu = platforms.split(",")[0] in ("cuda", "gpu") if platforms else num_gpus > 0
    if not is_gpu:
        own["JAX_NUM_CPU_DEVICES"] = str(num_devices)
        return [own] * num_replicas
    parts = slices(visible(own, num_gpus), num_replicas, num_devices)
    return [own | {_VISIBLE: ",".join(part)} for part in parts]


def slices(devices: list[str], num_replicas: int, num_devices: int) -> list[list[str]]:
    """Return the devices of each replica, `num_devices` in a row.

    Raises:
        ValueError: there are too few.
    """
    needed = num_replicas * num_devices
    if needed > len(devices):
        raise ValueError(
            f"data_parallel_size={num_replicas} with tensor_parallel_size={num_devices} needs "
            f"{needed} GPUs, and {len(devices)} are visible ({', '.join(devices) or 'none'}). "
            f"Lower one of them, or make more visible ({_VISIBLE})."
        )
    return [devices[first : first + num_devices] for first in range(0, needed, num_devices)]


def visible(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """Return the names of the GPUs that CUDA sees: indices, or ids such as "GPU-..." and "MIG-...".

    As in CUDA, the first index of no GPU hides all devices after it.

    Args:
        environment: Environment variables.
        num_gpus: Number of GPUs of the machine.
    """
    if _VISIBLE not in environment:
        return [str(index) for index in range(num_gpus)]
    found = list[str]()
    for name in map(str.strip, environment[_VISIBLE].split(",")):
        is_index = name.isdecimal() and int(name) < num_gpus
        if not (is_index or name.startswith(("GPU-", "MIG-"))):
            break
        found.append(name)
    return found


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine, 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2():
        return 0
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value

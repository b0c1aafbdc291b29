"""Tensors of a mapped file: shared memory that another process has filled."""

from pathlib import Path

import numpy as np

from jaxspec.models.safetensors_file import SafetensorsFile
from jaxspec.models.trees.folder import kind_of


def mapped_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name, as read-only views of its memory.

    The file must have exactly the bytes that its header names. It stays mapped as long as the
    arrays, and must not be truncated meanwhile, which would end this process.

    Raises:
        FileNotFoundError, ValueError: as `SafetensorsFile`; or a tensor has an unsupported dtype.
    """
    file = SafetensorsFile(path)
    try:
        kinds = {name: kind_of(name, stored) for name, stored in file.tensors.items()}
        content = np.frombuffer(file.map(), np.uint8)
        found = {
            name: _view(content[stored.start :][: stored.num_bytes], kinds[name], stored.shape)
            for name, stored in file.tensors.items()
        }
        file.check_unchanged()
        return found
    finally:
        file.close()


def _view(content: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if content.ctypes.data % dtype.itemsize:
        content = content.copy()  # no array of this dtype may begin here
    return content.view(dtype).reshape(shape)

"""Hidden states of a sample as a safetensors file, and the folder of these files."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.files import writable_folder
from jaxspec.models.safetensors_file import DTYPES

FORMAT = "jaxspec.hidden_states.1"
"""Format name in the file's metadata."""
_MAX_NAME = 150  # characters of a request id in a file name; file systems allow about 255
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class SampleStates:
    """A finished sample, and the hidden states of its tokens."""

    request_id: str
    index: int
    prompt_length: int
    token_ids: tuple[int, ...]  # prompt and output
    finish_reason: str
    # Parts `[pages, page_size, layers * hidden]`: all tokens but the last, then padding.
    states: Sequence[Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of the states, padding included."""
        return sum(part.nbytes for part in self.states)

    @property
    def file_name(self) -> str:
        """File name for any file system, unique for each request id and index."""
        quoted = urllib.parse.quote(self.request_id, safe="", errors="surrogatepass")
        quoted = quoted.replace(".", "%2E")
        if len(quoted) > _MAX_NAME:
            digest = hashlib.sha256(quoted.encode()).hexdigest()
            quoted = f"{quoted[: _MAX_NAME - len(digest) - 1]}~{digest}"
        return f"{quoted}-{self.index}.safetensors"


def write(folder: Path, sample: SampleStates, layers: Sequence[int], model: str) -> None:
    """Write `sample` to its file in `folder`, and replace an existing one.

    The file is renamed when it is complete, so no reader gets a partial file.

    Raises:
        OSError: it can't be written, e.g. because the disk is full. No partial file is left.
    """
    place = folder / sample.file_name
    part = folder / f".{sample.file_name}.part"
    try:
        with open(part, "wb") as file:
            for content in _contents(sample, layers, model):
                file.write(content)
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def prepare_folder(name: str) -> Path:
    """Return the folder of the files; it is made if only its last part is missing.

    Raises:
        ValueError: it can't be made, is a file, or no file can be written there.
    """
    return writable_folder(name, "Hidden states are saved to")


def _contents(
    sample: SampleStates, layers: Sequence[int], model: str
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file, part by part."""
    tokens = np.asarray(sample.token_ids, np.int32)
    dtype, features = sample.states[0].dtype, sample.states[0].shape[-1]
    shape = [len(tokens) - 1, len(layers), features // len(layers)]
    size = (len(tokens) - 1) * features * dtype.itemsize
    yield _header(
        {
            "__metadata__": _metadata(sample, layers, model),
            "hidden_states": _entry(_NAMES[np.dtype(dtype)], shape, 0, size),
            "token_ids": _entry("I32", [len(tokens)], size, tokens.nbytes),
        }
    )
    left = len(tokens) - 1
    for part in sample.states:
        rows = np.asarray(part)  # waits for the device
        rows = rows.reshape(math.prod(rows.shape[:-1]), features)[:left]
        left -= len(rows)
        yield rows.reshape(-1).view(np.uint8).data
    yield tokens.view(np.uint8).data


def _metadata(sample: SampleStates, layers: Sequence[int], model: str) -> dict[str, str]:
    """Return the file's metadata; the format allows only strings."""
    return {
        "format": FORMAT,
        "model": model,
        "layers": json.dumps(list(layers)),
        "prompt_length": str(sample.prompt_length),
        # Half a surrogate pair is not valid UTF-8.
        "request_id": sample.request_id.encode(errors="backslashreplace").decode(),
        "sample": str(sample.index),
        "finish_reason": sample.finish_reason,
    }


def _entry(dtype: str, shape: Sequence[int], start: int, num_bytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + num_bytes]}


def _header(header: Mapping[str, Any]) -> bytes:
    """Return the header and its length, padded with spaces to align the tensors."""
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content

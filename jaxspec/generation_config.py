"""What a checkpoint's generation_config.json says of sampling: what a call without parameters does.

It is taken as vLLM takes it: some of its fields are read, and the rest keep the defaults of
`SamplingParams`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.files import read_json
from jaxspec.sampling_params import SamplingParams

FILE = "generation_config.json"
# Its names, and those of `SamplingParams`. A name that `SamplingParams` lacks is passed over.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_params(source: str | Path, model_folder: Path) -> SamplingParams:
    """The parameters of a call that brings none.

    `source`: "auto" reads the model's folder, "vllm" no file, and a path that folder.

    Raises:
        FileNotFoundError: a folder other than the model's has no such file.
        ValueError: it is no JSON, or a value of it breaks a rule of `SamplingParams`.
    """
    if source == "vllm":
        return SamplingParams()
    folder = model_folder if source == "auto" else Path(source).expanduser()
    path = folder / FILE
    if not path.exists():
        if source == "auto":
            return SamplingParams()
        raise FileNotFoundError(
            f"generation_config must be 'auto', 'vllm' or a folder with a {FILE}, and {folder} has "
            "none. Check the path."
        )
    return _read(read_json(path), path)


def _read(published: dict[str, Any], path: Path) -> SamplingParams:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    found = {
        name: published[theirs]
        for theirs, name in _NAMES.items()
        if name in fields and published.get(theirs) is not None
    }
    try:
        return SamplingParams(**found)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error} Pass generation_config='vllm' to do without the file."
        ) from error

"""Default sampling parameters of a checkpoint, read from generation_config.json.

As in vLLM, only some of its fields are used; the others keep the defaults of `SamplingParams`.
"""

from pathlib import Path
from typing import Any

from jaxspec.files import read_json
from jaxspec.requests.sampling_params import SamplingParams

FILE = "generation_config.json"
# Field names of the file, mapped to those of `SamplingParams`.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_params(source: str | Path, model_folder: Path) -> SamplingParams:
    """Return the sampling parameters of calls without `SamplingParams`.

    Args:
        source: "auto" reads the file in `model_folder` if it exists, "vllm" returns the defaults
            of `SamplingParams`, and a path reads the file in that folder.
        model_folder: Folder of the checkpoint.

    Raises:
        FileNotFoundError: the folder `source` has no generation_config.json.
        ValueError: the file is not JSON, or has a value that `SamplingParams` rejects.
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
    found = {
        name: published[theirs]
        for theirs, name in _NAMES.items()
        if published.get(theirs) is not None
    }
    try:
        return SamplingParams(**found)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error} Pass generation_config='vllm' to do without the file."
        ) from error

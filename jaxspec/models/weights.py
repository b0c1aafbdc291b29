"""safetensors files to the parameters of a model, checked tensor by tensor."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.parameters import Placement

_INDEX = "model.safetensors.index.json"


def resolve_folder(
    name_or_path: str | Path, progress: bool = False, *, weights: bool = True
) -> Path:
    """The folder of a checkpoint: `name_or_path` itself, or a hub id downloaded (or cached).

    Without `progress` the hub's own bars stay hidden; without `weights` those are not downloaded.
    Raises FileNotFoundError when it is neither, or the hub cannot be reached.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    rule = "A model must be a folder or a Hugging Face hub id such as Qwen/Qwen3.5-0.8B"
    if folder.exists():
        raise FileNotFoundError(f"{rule}; {folder} is a file. Give the folder that holds it.")
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    patterns = ["*.safetensors"] * weights + ["*.json", "*.jinja", "*.txt"]
    try:
        with contextlib.nullcontext() if progress else _no_hub_bars():
            return Path(snapshot_download(str(name_or_path), allow_patterns=patterns))
    except Exception as error:  # networks fail with exceptions of many kinds
        raise FileNotFoundError(f"{rule}; {str(name_or_path)!r} {_why_not(error)}") from error


def _why_not(error: Exception) -> str:
    """What the hub's error means to the user who named the model, and the way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "is neither: there is no such folder. Check the path."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "is no folder here, and the hub has no such model, or not for you. Check the name; if "
            "the model is private or gated, log in with `hf auth login`."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "is no folder here, was not downloaded before, and the hub can't be reached. Check the "
            "name and the network, or download the model elsewhere and give its folder."
        )
    reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")
    return (
        f"is no folder here, and downloading it failed ({reason}). Try again, or download the "
        "model another way and give its folder."
    )


@contextlib.contextmanager
def _no_hub_bars() -> Iterator[None]:
    """Hide the hub's bars inside; the hub only has one switch for all of them."""
    from huggingface_hub import utils

    was_hidden = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_hidden:
            utils.enable_progress_bars()


class Checkpoint:
    """The tensors in a folder's safetensors files, read one at a time. A context manager.

    Reads `model.safetensors.index.json` and its shards, or else every `model*.safetensors`.
    """

    def __init__(self, folder: Path):
        """Open every file; errors as `load_model`."""
        self.folder = folder
        self._open_files = contextlib.ExitStack()
        self._files: dict[str, list[tuple[Path, Any]]] = {}  # tensor -> files that hold it
        for path in _weight_files(folder):
            reader = self._open(path)
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                self._files.setdefault(name, []).append((path, reader))

    def __enter__(self) -> "Checkpoint":
        """The checkpoint itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self._open_files.close()

    def _open(self, path: Path) -> Any:
        try:
            return self._open_files.enter_context(safe_open(path, framework="np"))
        except SafetensorError as error:
            self._open_files.close()
            raise ValueError(
                f"{path} must be a whole safetensors file, but it is cut short or damaged "
                f"({path.stat().st_size} bytes). Download it again."
            ) from error
        except OSError as error:
            self._open_files.close()
            raise ValueError(
                f"{path} must be a file that can be read, but opening it failed: {error}. Check "
                "its permissions, or download it again."
            ) from error

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's published name."""
        return frozenset(self._files)

    def files_of(self, name: str) -> list[str]:
        """The names of the files that hold a tensor: one, in a sound checkpoint."""
        return [path.name for path, _ in self._files[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header."""
        return tuple(self._files[name][0][1].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor as stored."""
        return self._files[name][0][1].get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{index} must map tensor names to files under `weight_map`, and does not. "
                "Download it again."
            ) from error
        files = [folder / shard for shard in shards]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(
                f"{folder} must hold every file that {index.name} names, and lacks "
                f"{', '.join(absent)}. Download what is missing."
            )
        return files
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise FileNotFoundError(
            f"{folder} must hold model.safetensors, or {_INDEX} with its shards, and "
            + (
                "has only pytorch_model.bin, which jaxspec does not read. Download the safetensors "
                "files, or convert it with save_pretrained of transformers."
                if pickled
                else "has neither. Download the safetensors files."
            )
        )
    return files


def load_weights(
    family: type[Model],
    config: ModelConfig,
    dtype: jnp.dtype,
    checkpoint: Checkpoint,
    *,
    progress: bool = False,
) -> Model:
    """A model of the `family` with the checkpoint's weights, each moved to the device when read.

    With `progress` a bar shows what is read, if it takes more than half a second. Raises one
    ValueError naming every missing, unexpected, duplicate and mis-shaped tensor.
    """
    published: dict[str, list[str]] = {}  # canonical name -> published spellings of it
    for name in sorted(checkpoint.names):
        canonical = family.canonical_name(name)
        if canonical is not None:
            published.setdefault(canonical, []).append(name)
    model = nnx.eval_shape(lambda: family(config, dtype, frozenset(published)))
    placements = list(model.checkpoint())
    _check(placements, published, checkpoint)

    of_param: dict[int, list[Placement]] = {}
    for placement in placements:
        of_param.setdefault(id(placement.param), []).append(placement)
    with tqdm(
        total=sum(map(_num_bytes, placements)),
        desc="loading",
        unit="B",
        unit_scale=True,
        delay=0.5,
        leave=False,
        disable=not progress,
    ) as bar:
        for parts in of_param.values():
            param = parts[0].param
            value = np.zeros(param.shape, param.dtype)  # zeros stay where the parameter is padded
            for part in parts:
                tensor = checkpoint.read(published[part.name][0])
                target = value[part.index]
                target[...] = (tensor.T if part.transpose else tensor).reshape(target.shape)
            param.set_value(jax.device_put(value))
            bar.update(sum(map(_num_bytes, parts)))
    return model


def _num_bytes(placement: Placement) -> int:
    """The size of a published tensor in its parameter's dtype."""
    return math.prod(placement.shape) * np.dtype(placement.param.dtype).itemsize


def _check(
    placements: Iterable[Placement], published: dict[str, list[str]], checkpoint: Checkpoint
) -> None:
    wanted = {placement.name: placement.shape for placement in placements}
    problems = {
        "Missing": sorted(wanted.keys() - published.keys()),
        "Unexpected": sorted(
            name for c in published.keys() - wanted.keys() for name in published[c]
        ),
        "Twice": [],
        "Wrong shape": [],
    }
    for canonical, names in sorted(published.items()):
        files = [file for name in names for file in checkpoint.files_of(name)]
        if len(files) > 1:
            problems["Twice"].append(f"{canonical} (in {' and '.join(files)})")
        for name in names if canonical in wanted else ():
            if (shape := checkpoint.shape(name)) != wanted[canonical]:
                shapes = f"{list(shape)} instead of {list(wanted[canonical])}"
                problems["Wrong shape"].append(f"{name} {shapes}")
    if any(problems.values()):
        found = " ".join(
            f"{kind} ({len(named)}): {', '.join(named)}."
            for kind, named in problems.items()
            if named
        )
        raise ValueError(
            f"The tensors in {checkpoint.folder} must be exactly those its config.json asks for. "
            f"{found} Check that config.json belongs to these weights, or download both again."
        )

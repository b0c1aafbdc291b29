"""safetensors files to the parameters of a model, checked tensor by tensor."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import Placement

_INDEX = "model.safetensors.index.json"


def resolve_folder(name_or_path: str | Path) -> Path:
    """The folder of a checkpoint: `name_or_path` itself, or a hub id downloaded (or cached).

    Raises FileNotFoundError when it is neither, or the hub cannot be reached.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    try:
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
        return Path(snapshot_download(str(name_or_path), allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise FileNotFoundError(
            f"A model is a folder or a Hugging Face hub id; {str(name_or_path)!r} is no folder, "
            f"and the hub did not give it ({reason}). Check "
            "the name and the network, or download the model and give its folder."
        ) from error


class Checkpoint:
    """The tensors in a folder's safetensors files, read one at a time. A context manager.

    Reads `model.safetensors.index.json` and its shards, or else every `model*.safetensors`.
    """

    def __init__(self, folder: Path):
        """Open every file; errors as `load_model`."""
        self.folder = folder
        self._open_files = contextlib.ExitStack()
        self._files: dict[str, list[tuple[Path, Any]]] = {}  # tensor -> where it lies
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
        except (SafetensorError, OSError) as error:
            self._open_files.close()
            raise ValueError(
                f"{path} must be a whole safetensors file, but reading it failed: {error}. It may "
                "be truncated or corrupt: download it again."
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
                f"{index} must map tensor names to files under `weight_map`, but reading it "
                f"failed: {error!r}. Download it again."
            ) from error
        files = [folder / shard for shard in shards]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(
                f"{index} names files that {folder} lacks: {', '.join(absent)}. Download them."
            )
        return files
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise FileNotFoundError(
            f"{folder} must hold model.safetensors or {_INDEX} with its shards, and holds neither"
            + (
                "; it has only pytorch_model.bin, which jaxspec does not read. "
                if pickled
                else ". "
            )
            + "Download the safetensors files, or convert with transformers' save_pretrained."
        )
    return files


def load_weights(
    model_class: Any, config: ModelConfig, dtype: jnp.dtype, checkpoint: Checkpoint
) -> Model:
    """A `model_class` with the checkpoint's weights, each moved to the device as it is read.

    Raises one ValueError naming every missing, unexpected, duplicate and mis-shaped tensor.
    """
    published: dict[str, list[str]] = {}  # canonical name -> published spellings of it
    for name in sorted(checkpoint.names):
        canonical = model_class.canonical_name(name)
        if canonical is not None:
            published.setdefault(canonical, []).append(name)
    model = nnx.eval_shape(lambda: model_class.for_tensors(config, dtype, frozenset(published)))
    placements = list(model.checkpoint())
    _check(placements, published, checkpoint)

    of_param: dict[int, list[Placement]] = {}
    for placement in placements:
        of_param.setdefault(id(placement.param), []).append(placement)
    for parts in of_param.values():
        param = parts[0].param
        value = np.empty(param.shape, param.dtype)
        for part in parts:
            tensor = checkpoint.read(published[part.name][0])
            target = value[..., slice(*part.columns)] if part.columns else value
            target[...] = (tensor.T if part.transpose else tensor).reshape(target.shape)
        param.set_value(jax.device_put(value))
    return model


def _check(
    placements: Iterable[Placement], published: dict[str, list[str]], checkpoint: Checkpoint
) -> None:
    wanted = {placement.name: placement.shape for placement in placements}
    problems = {
        "missing": sorted(wanted.keys() - published.keys()),
        "unexpected": sorted(
            name for c in published.keys() - wanted.keys() for name in published[c]
        ),
        "duplicate": [],
        "mis-shaped": [],
    }
    for canonical, names in sorted(published.items()):
        files = [file for name in names for file in checkpoint.files_of(name)]
        if len(files) > 1:
            problems["duplicate"].append(f"{canonical} (in {', '.join(files)})")
        for name in names if canonical in wanted else ():
            if (shape := checkpoint.shape(name)) != wanted[canonical]:
                problems["mis-shaped"].append(f"{name} {shape}, not {wanted[canonical]}")
    if any(problems.values()):
        found = "; ".join(
            f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names
        )
        raise ValueError(
            f"The tensors in {checkpoint.folder} must be exactly those its config.json asks for. "
            f"{found}. Check that config.json belongs to these weights, or download both again."
        )

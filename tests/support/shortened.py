"""Checkpoints with some of the layers of a larger one, for tests that need each kind only once."""

import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, for safetensors
import numpy as np
from safetensors.numpy import load_file, save_file

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def write_shortened(source: Path, kept: tuple[int, ...], folder: Path) -> Path:
    """Write the checkpoint `source` with the layers `kept` alone to the new folder `folder`."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    kinds = [config["layer_types"][layer] for layer in kept]
    short = config | {"num_hidden_layers": len(kept), "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(short))
    weights = {}
    for name, values in load_file(source / "model.safetensors").items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            weights[name] = values
        elif int(layer[1]) in kept:
            weights[f"model.layers.{kept.index(int(layer[1]))}.{layer[2]}"] = values
    save_file(weights, folder / "model.safetensors")
    return folder


@contextlib.contextmanager
def copied_with(folder: Path, tensors):
    """A copy of a checkpoint folder with other tensors, until the block ends."""
    with tempfile.TemporaryDirectory() as name:
        other = Path(name) / folder.name
        shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.safetensors*"))
        arrays = {key: np.asarray(each) for key, each in tensors.items()}
        save_file(arrays, other / "model.safetensors")
        yield other

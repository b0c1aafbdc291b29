"""Description of the recorded engine in a flight, and the checks that a replay makes of it."""

import dataclasses
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxspec import device
from jaxspec.checks import shown
from jaxspec.gguf import is_gguf
from jaxspec.options import SpeculativeConfig
from jaxspec.options.engine_options import EngineConfig
from jaxspec.requests.logits_processors import place_of

_HEAD = 2**20  # bytes of each file that are hashed: its header, and some weights

OWN = (
    *("compilation_cache", "show_progress", "flight_recorder", "flight_folder", "profiler_folder"),
    *("tokenizer", "skip_tokenizer_init", "generation_config", "reasoning_parser"),
    *("kv_offloading_folder", "kv_offloading_folder_size"),
    *("nnodes", "node_rank", "master_addr", "master_port", "nodes_key_file"),
)
"""Options that no step depends on: they are neither recorded nor replayed."""


def about(
    config: EngineConfig, folder: Path, vocab_size: int, weight_version: str | None = None
) -> dict[str, Any]:
    """Return what a replay needs in addition to plans, in JSON's types.

    Args:
        config: Options, with every one resolved that the device decides.
        folder: Folder or file of the checkpoint.
        vocab_size: Number of token ids.
        weight_version: Version of weights that are not those of the checkpoint; None if they are.
    """
    options = options_of_steps(config)
    if config.model is not None:
        options["model"] = _place(config.model)
    here = device.default_device()
    return {
        "options": options,
        "vocab_size": vocab_size,
        "checkpoint": digest_of(folder),
        "weight_version": weight_version,
        "device": here.device_kind,
        "versions": versions(),
    }


def options_of_steps(config: EngineConfig) -> dict[str, Any]:
    """Return the options that steps depend on, in JSON's types."""
    plain = dataclasses.replace(config, speculative_config=None, logits_processors=None)
    options = dataclasses.asdict(plain)
    options["speculative_config"] = _recorded(config.speculative_config)
    options["logits_processors"] = [place_of(each) for each in config.logits_processors or ()]
    return {name: value for name, value in options.items() if name not in OWN}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that compute."""
    packages = "jaxspec", "jax", "jaxlib", "numpy"
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def _place(model: str | Path) -> str:
    """Return the absolute path of a folder or a GGUF file, or the hub id."""
    folder = Path(model).expanduser()
    return str(folder.resolve() if is_here(folder) else model)


def is_here(model: str | Path) -> bool:
    return Path(model).is_dir() or is_gguf(Path(model))


def _recorded(speculation: Any) -> Any:
    """Return the options as by `asdict`, with only the class name of a custom proposer."""
    if not isinstance(speculation, SpeculativeConfig):
        return speculation
    if speculation.method != "custom":
        fields = dataclasses.asdict(speculation)
        if fields["options"].get("model") is not None:  # drafter's checkpoint
            fields["options"]["model"] = _place(fields["options"]["model"])
        return fields
    fields = {
        field.name: getattr(speculation, field.name) for field in dataclasses.fields(speculation)
    }
    return fields | {"options": {"proposer": speculation.options.name}}


def check_speculation(recorded: Any) -> None:
    """Refuse to replay a custom proposer, or a drafter whose checkpoint is not on this machine.

    Raises:
        ValueError: the method is "custom", or the path of the drafter's checkpoint does not exist.
    """
    if not isinstance(recorded, dict):
        return
    told = recorded.get("options")
    if recorded.get("method") == "custom":
        raise ValueError(
            "A flight must be replayed with a proposer of jaxspec's own, and this one was recorded "
            f"with {shown(told)}: a file brings no code in. Record one with another method, or "
            "without drafts."
        )
    drafter = told.get("model") if isinstance(told, dict) else None
    if drafter is not None and not (isinstance(drafter, str) and is_here(drafter)):
        raise ValueError(
            "A flight must be replayed with a drafter's checkpoint that lies here, and it was "
            f"recorded with {shown(drafter)}. Put its folder or file there."
        )


def check_weights(recorded: Any) -> None:
    """Refuse to replay steps of weights that are in no checkpoint.

    Raises:
        ValueError: the weights were given as arrays or updated.
    """
    if recorded is not None:
        raise ValueError(
            "A flight must be replayed with the weights of a checkpoint, and this one was recorded "
            f"with weights of version {shown(recorded)} from the memory of its process. Save them "
            "with export_weights, and record an engine of the saved folder."
        )


def check_processors(recorded: Any) -> None:
    """Refuse to replay logits processors of the user.

    Raises:
        ValueError: the engine had some.
    """
    if recorded:
        raise ValueError(
            f"A flight must be replayed without logits processors, and this one was recorded with "
            f"{shown(recorded)}: a flight has no code of processors, and replay imports none. "
            "Record one without them."
        )


def check_plugin(recorded: Any) -> None:
    """Refuse to import a module that a file names.

    Raises:
        ValueError: a module registered the architecture of the model.
    """
    if recorded is not None:
        raise ValueError(
            "A flight must be replayed with a module that its reader names, and this one was "
            f"recorded with model_plugin={shown(recorded)}: replay imports no module that a file "
            "names. If you trust the module, pass it with --model-plugin."
        )


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:  # runs from its sources
        return None


def digest_of(folder: Path) -> str:
    """Return a digest of a checkpoint: of config.json, and of sizes and heads of the weight files.

    A head is the first megabyte. `folder` may be a GGUF file, whose header has the information of
    config.json. Hashing all weights would take as long as loading them.
    """
    digest = hashlib.sha256()
    files = [folder, folder / "config.json", *folder.glob("*.safetensors")]
    for path in sorted(path for path in files if path.is_file()):
        name = "" if path == folder else path.name  # a GGUF file may have any name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD))
    return digest.hexdigest()


VERSION = version_of("jaxspec") or "unknown"
"""Installed version of jaxspec, or "unknown" for sources that are not installed."""

"""Table of the GGUF architectures that jaxspec supports; a new one is one entry."""

from jaxspec.checks import shown
from jaxspec.gguf.file import GGUFFile
from jaxspec.models.gguf import (
    REMEDY,
    attention,
    falcon_h1,
    gated_hybrid,
    granite,
    lfm2,
    mamba2,
    nemotron_h,
)
from jaxspec.models.gguf.architecture import Architecture
from jaxspec.models.gguf.described import Described
from jaxspec.models.gguf.options import OPTIONS, Noted
from jaxspec.models.kinds import WORD, Block

ARCHITECTURES: dict[str, Architecture] = {
    "falcon-h1": falcon_h1.FALCON_H1,
    "granite": granite.GRANITE,
    "granitehybrid": granite.GRANITE_HYBRID,
    "granitemoe": granite.GRANITE,
    "lfm2": lfm2.LFM2,
    "lfm2moe": lfm2.LFM2_MOE,
    "llama": attention.LLAMA,
    "mamba2": mamba2.MAMBA2,
    "nemotron_h": nemotron_h.NEMOTRON_H,
    "nemotron_h_moe": nemotron_h.NEMOTRON_H,
    "qwen3": attention.QWEN3,
    "qwen35": gated_hybrid.QWEN35,
    "qwen35moe": gated_hybrid.QWEN35_MOE,
    "qwen3moe": attention.QWEN3_MOE,
    "qwen3next": gated_hybrid.QWEN3_NEXT,
}
"""Keyed by `general.architecture` of the metadata."""

_KEY = "general.architecture"


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """Return the name of the file's architecture, and the architecture.

    Raises:
        ValueError: It is missing or not supported.
    """
    name = Block(file.metadata, file=str(file.path), remedy=REMEDY).need(_KEY, WORD)
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: `{_KEY}` must be one of {', '.join(sorted(ARCHITECTURES))}, got "
            f"{shown(name)}. Use a model of one of those, or the folder of its safetensors."
        )
    return name, ARCHITECTURES[name]


def described(file: GGUFFile) -> Described:
    """Return the file's description of its model, after checking its options.

    Raises:
        ValueError: As `architecture_of`, or an option is not implemented.
    """
    name, architecture = architecture_of(file)
    prefix = f"{name}."
    entries = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    sizes = Block(Noted(entries), file=str(file.path), prefix=prefix, remedy=REMEDY)
    options = {**OPTIONS, **architecture.options}
    sizes.refuse_all_but({key: values for key, values in options.items() if values is not None})
    return Described(file, sizes)

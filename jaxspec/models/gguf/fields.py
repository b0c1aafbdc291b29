"""read_fields: convert a GGUF file's metadata to the fields of a config.json."""

from pathlib import Path
from typing import Any

from jaxspec.gguf.file import GGUFFile
from jaxspec.models.fields import Fields
from jaxspec.models.gguf import REMEDY
from jaxspec.models.gguf.architectures import architecture_of, described
from jaxspec.models.gguf.described import Described
from jaxspec.models.gguf.options import refuse_unread
from jaxspec.models.kinds import SIZE, Block, number, whole

_POSITIVE = number(1e-30, 1e30)
_TOKEN = whole(0, 2**31 - 1)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, turn and message


def read_fields(path: Path) -> Fields:
    """Read the fields of the model in the file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: As `GGUFFile`; the architecture is not supported; or the metadata lacks a size,
            has one of the wrong kind, or an option that is unknown or not implemented.
    """
    with GGUFFile(path) as file:
        return Fields(_entries(file), remedy=REMEDY)


def _entries(file: GGUFFile) -> dict[str, Any]:
    _, architecture = architecture_of(file)
    model = described(file)
    sizes = model.sizes
    entries = {
        "architectures": [architecture.published],
        "hidden_size": sizes.need("embedding_length", whole(1, 2**31 - 1)),
        "max_position_embeddings": sizes.need("context_length", whole(1, 2**31 - 1)),
        "num_hidden_layers": model.num_layers,
        "vocab_size": _vocab_size(model),
        "eos_token_id": _ends(Block(file.metadata, file=str(file.path), remedy=REMEDY)),
        architecture.eps: sizes.need("attention.layer_norm_rms_epsilon", _POSITIVE),
        **architecture.entries(model),
    }
    refuse_unread(sizes)
    return entries


def _vocab_size(model: Described) -> int:
    """Return the rows of the embedding, which may exceed the number of tokens."""
    if (embedding := model.file.tensors.get("token_embd.weight")) is not None:
        return embedding.shape[0]
    return model.sizes.need("vocab_size", SIZE)


def _ends(metadata: Block) -> list[int]:
    """Return the ids that end an output."""
    found = (metadata.find(f"tokenizer.ggml.{key}", _TOKEN) for key in _END_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))

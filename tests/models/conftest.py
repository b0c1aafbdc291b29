"""Checkpoints with the logits of another implementation, and a driver of one request."""

import pytest
from harness import FIXTURES
from safetensors.numpy import load_file
from single_request import SingleRequest


@pytest.fixture(scope="session")
def single_request():
    """The driver's class."""
    return SingleRequest


@pytest.fixture(scope="session")
def fixture_folder():
    """A fixture checkpoint's folder by name."""
    return lambda name: FIXTURES / name


@pytest.fixture(scope="session")
def reference():
    """The reference tensors of a fixture checkpoint by name."""
    return lambda name: load_file(FIXTURES / name / "reference.safetensors")

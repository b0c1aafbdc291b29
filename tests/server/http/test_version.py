"""The version of what is installed, if it is."""

import importlib.metadata

from jaxspec.flight import about
from jaxspec.server.http.version import version


def test_sources_that_are_not_installed_have_an_unknown_version(monkeypatch):
    monkeypatch.setattr(about, "version", lambda name: f"{name} 3")
    assert version() == "jaxspec 3"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(about, "version", missing)
    assert version() == "unknown"

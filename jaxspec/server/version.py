"""Which jaxspec serves."""

import importlib.metadata


def version() -> str:
    """The installed version; "unknown" where the sources run without being installed."""
    try:
        return importlib.metadata.version("jaxspec")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

"""Which jaxspec serves."""

from jaxspec.flight.about import version_of


def version() -> str:
    """The installed version; "unknown" where the sources run without being installed."""
    return version_of("jaxspec") or "unknown"

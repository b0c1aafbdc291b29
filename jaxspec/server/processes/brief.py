"""Brief: what an API process is told when it starts."""

from typing import NamedTuple

from jaxspec.async_llm import Elsewhere
from jaxspec.server.options import ServerOptions


class Brief(NamedTuple):
    """All that an API process needs; it can be pickled."""

    options: ServerOptions
    engine: Elsewhere
    created: int  # `Service.created`, which all processes tell alike

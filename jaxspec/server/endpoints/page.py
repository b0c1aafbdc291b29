"""GET /: the page for people."""

from starlette.responses import HTMLResponse, Response

from jaxspec.server.page.document import DOCUMENT, HEADERS
from jaxspec.server.routing import make_router

router = make_router()


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page, which asks for a key itself if the server wants one."""
    return HTMLResponse(DOCUMENT, headers=HEADERS)

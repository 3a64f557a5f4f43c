"""The dashboard: a page over an events file, served beside the controller or anywhere the file can be read.

    with serve_dashboard("127.0.0.1:7080", Path("events.jsonl")) as address:     # needs weft[dashboard]
        ...                                                                      # open it in a browser

Only reads. Everything the page needs comes from this server. Beyond loopback, a token is required: the address that is
yielded has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.web.following import FollowedFile
from weft.web.page_file import page_text

LOOK_S = 1.0
"""How often a page hears of changes, at most."""
KEEP_ALIVE_S = 15.0
START_S = 10.0
COOKIE = "weft_token"
FILES = {
    "dashboard.js": "text/javascript",
    "charts.js": "text/javascript",
    "echarts.min.js": "text/javascript",
    "page.css": "text/css",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@contextlib.contextmanager
def serve_dashboard(bind: str, events: Path) -> Iterator[str]:
    """Serve it on `HOST:PORT`; yields the address to open."""
    try:
        import uvicorn  # noqa: PLC0415 - an extra
        from starlette.applications import Starlette  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError("the dashboard needs starlette and uvicorn", hint="pip install 'weft[dashboard]'") from error
    host, port = _parsed(bind)
    token = "" if _is_loopback(host) else secrets.token_urlsafe(16)
    listening = _listen(host, port)
    over = threading.Event()
    config = uvicorn.Config(application(FollowedFile(events), token, over), log_level="error", lifespan="off")
    config.timeout_graceful_shutdown = 3
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="weft-dashboard", daemon=True)
    thread.start()
    try:
        _wait_started(server, thread)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
    finally:
        over.set()  # streams of events do not end by themselves
        server.should_exit = True
        thread.join(START_S)
        listening.close()


def application(story: FollowedFile, token: str, over: threading.Event) -> Any:
    """The web application; with a token, requests without it are refused. `over`: streams end."""
    from starlette.applications import Starlette  # noqa: PLC0415 - an extra
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    def refused(request: Any) -> Any:
        """What is answered to a request without the token; None if it has it."""
        given = request.query_params.get("token") or request.cookies.get(COOKIE) or ""
        if token and not secrets.compare_digest(given.encode(), token.encode()):
            return PlainTextResponse("the token is missing or wrong: open the address the dashboard printed", 401)
        return None

    def page(_: Any) -> Any:
        response = Response(page_text("dashboard.html"), media_type="text/html", headers=_HEADERS)
        if token:
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response

    def file(request: Any) -> Any:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("there is no such file", 404)
        return Response(page_text(name), media_type=FILES[name], headers=_HEADERS)

    def state(_: Any) -> Any:
        return JSONResponse(story.state(), headers=_HEADERS)

    def links(_: Any) -> Any:
        return JSONResponse(story.links(), headers=_HEADERS)

    def version(request: Any) -> Any:
        found = story.version(request.path_params["number"])
        if found is None:
            return JSONResponse({"error": "this version is not known, or not any more"}, 404, headers=_HEADERS)
        return JSONResponse(found, headers=_HEADERS)

    def stream(request: Any) -> Any:
        return StreamingResponse(_changes(story, request, over), media_type="text/event-stream", headers=_HEADERS)

    def guarded(answer: Any) -> Any:
        return lambda request: refused(request) or answer(request)

    routes = {
        "/": page,
        "/page/{name}": file,
        "/api/state": state,
        "/api/links": links,
        "/api/versions/{number:int}": version,
        "/api/changes": stream,
    }
    return Starlette(routes=[Route(path, guarded(answer)) for path, answer in routes.items()])


async def _changes(story: FollowedFile, request: Any, over: threading.Event) -> AsyncIterator[str]:
    """The state, whenever it has changed, as server-sent events."""
    known: tuple[int, int] | None = None
    quiet_since = time.monotonic()
    while not over.is_set() and not await request.is_disconnected():
        found = await asyncio.to_thread(story.revision)
        if found != known:
            known, quiet_since = found, time.monotonic()
            yield f"data: {json.dumps(await asyncio.to_thread(story.state))}\n\n"
        elif time.monotonic() - quiet_since > KEEP_ALIVE_S:
            quiet_since = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(LOOK_S)


def _parsed(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the dashboard cannot be served on `{bind}`", hint="give HOST:PORT, as in 127.0.0.1:7080")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"the dashboard cannot be served on `{host}:{port}`: {error.strerror}") from error


def _wait_started(server: Any, thread: threading.Thread) -> None:
    deadline = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise ConfigError("the dashboard did not start")
        time.sleep(0.01)

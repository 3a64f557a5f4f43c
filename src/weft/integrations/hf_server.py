"""A small server around an HfEngine, for experiments: `weft serve MODEL --controller tcp://ctl:7070`.

POST /generate     {"input_ids": [1, 2, 3], "max_new_tokens": 16, "temperature": 0}
                   → {"output_ids": […], "weight_versions": [{"version": 3, "start": 0, "end": 16}]}
GET  /version      → {"version": 3, "error": null}
GET  /health
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from weft.errors import IntegrityError, WeftError
from weft.integrations.hf_engine import EngineThread

MAX_BODY_BYTES = 1 << 22


def make_app(engine: EngineThread) -> Starlette:
    """The server's routes; closes the engine when it ends."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    async def generate(request: Request) -> JSONResponse:
        try:
            prompt, options = _parsed(await request.body())
            answer = await asyncio.wrap_future(engine.ask(prompt, **options))
        except (ValueError, WeftError) as error:
            return JSONResponse({"error": str(error)}, status_code=503 if isinstance(error, IntegrityError) else 400)
        spans = [asdict(span) for span in answer.spans]
        return JSONResponse({"output_ids": answer.tokens, "weight_versions": spans})

    async def version(_: Request) -> JSONResponse:
        error = None if engine.error is None else str(engine.error)
        try:
            return JSONResponse({"version": engine.version, "error": error})
        except IntegrityError as torn:
            return JSONResponse({"version": None, "error": str(torn)}, status_code=503)

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/version", version),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _parsed(body: bytes) -> tuple[list[int], dict[str, Any]]:
    """Prompt and options of a request. Raises ValueError saying what is wrong with it."""
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"the request has {len(body)} bytes, more than the limit of {MAX_BODY_BYTES}")
    request = json.loads(body)
    if not isinstance(request, dict):
        raise ValueError("the request is not a JSON object")
    unknown = sorted(set(request) - {"input_ids", "max_new_tokens", "temperature"})
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    prompt, count = request.get("input_ids"), request.get("max_new_tokens", 16)
    temperature = request.get("temperature", 0)
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise ValueError("input_ids must be a list of token numbers")
    if type(count) is not int or count < 1:
        raise ValueError("max_new_tokens must be 1 or more")
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 10:
        raise ValueError("temperature must be a number from 0 to 10")
    sampling = {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
    return prompt, {"max_new_tokens": count, **sampling}

"""The application: routes and what belongs to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laguna_gguf.errors import RequestError
from laguna_gguf.http import errors
from laguna_gguf.http.bodies import ClientGone, parse_object, read_body
from laguna_gguf.http.middleware import Answers, ApiKeys
from laguna_gguf.http.responses import error_response, json_response, mark_gone
from laguna_gguf.serve.metrics import Metrics
from laguna_gguf.serve.requests import GenerationRequest, chat_request, completion_request
from laguna_gguf.serve.responses import GenerationResponse
from laguna_gguf.serve.settings import Settings
from laguna_gguf.serve.worker import Worker

Read = Callable[[Mapping[str, Any], Settings], GenerationRequest]


def create_app(worker: Worker, metrics: Metrics, settings: Settings) -> Starlette:
    """An ASGI application over a worker that somebody else starts and stops."""
    started = int(time.time())

    def generating(read: Read) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            worker.check_ready()
            try:
                data = await read_body(request.receive, request.headers, settings.limits)
            except ClientGone:
                mark_gone(request.scope)
                return Response(status_code=400)
            job = worker.submit(read(parse_object(data, settings.limits), settings))
            return GenerationResponse(worker, job, settings.limits)

        return endpoint

    def health(request: Request) -> Response:
        worker.check_ready()
        return json_response({"status": "ok"})

    def model() -> dict[str, Any]:
        entry = {"id": settings.alias, "object": "model", "created": started, "owned_by": "laguna-gguf"}
        return entry | {"meta": worker.details or None}

    def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model()]})

    def one_model(request: Request) -> Response:
        if request.path_params["name"] != settings.alias:
            raise errors.of_status(404, f"the model here is {settings.alias!r}")
        return json_response(model())

    def metrics_text(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/v1/chat/completions", generating(chat_request), methods=["POST"]),
        Route("/v1/completions", generating(completion_request), methods=["POST"]),
        Route("/v1/models", _async(models)),
        Route("/v1/models/{name:path}", _async(one_model)),
        Route("/health", _async(health)),
        Route("/v1/health", _async(health)),
        Route("/metrics", _async(metrics_text)),
    ]
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(Answers, count=lambda path, status: metrics.requests.labels(path, status).inc(), paths=paths)
    ]
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        )
    middleware.append(Middleware(ApiKeys, keys=settings.api_keys))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, RequestError: _request_error},  # type: ignore[dict-item]
    )


def _async(function: Callable[[Request], Response]) -> Callable[[Request], Any]:
    """In the event loop: starlette would give a plain function a thread."""

    async def endpoint(request: Request) -> Response:
        return function(request)

    return endpoint


async def _http_error(request: Request, error: HTTPException) -> Response:
    messages = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not for this path"}
    refusal = errors.of_status(error.status_code, messages.get(error.status_code, str(error.detail)))
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def _request_error(request: Request, error: RequestError) -> Response:
    return error_response(error)

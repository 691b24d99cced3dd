"""``GET /v1/models``: the one model there is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.api.service import Service
from gateway.errors import Fault, GatewayError


def routes(service: Service) -> APIRouter:
    """The list, and the model alone."""
    api = APIRouter()

    @api.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_openai_model(service)]}

    @api.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        found = _openai_model(service)
        if name != found["id"]:
            raise GatewayError(
                Fault.NOT_FOUND, f"no model {name!r}; this service has {found['id']!r}", param="model"
            )
        return found

    return api


def _openai_model(service: Service) -> dict[str, Any]:
    model = service.router.model
    return {
        "id": model.name,
        "object": "model",
        "created": service.started,
        "owned_by": "twinspark",
        "context_length": model.context_tokens,
    }

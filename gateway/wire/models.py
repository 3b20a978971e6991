"""/v1/models: the list with the one model that is served, and that model."""

from __future__ import annotations

from typing import Any

OWNER = "penstock"


def model_body(model: str, created_s: int, **more: Any) -> dict[str, Any]:
    """One model. `more` are further fields, such as ``max_model_len`` and ``version``; clients keep and ignore them."""
    return {"id": model, "object": "model", "created": created_s, "owned_by": OWNER, **more}


def model_list_body(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of `model_body`s."""
    return {"object": "list", "data": models}

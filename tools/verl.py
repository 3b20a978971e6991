"""Tool entries in verl's shape (`class_name`, `config`, `tool_schema`), read as ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

MARGIN_S = 5.0
"""verl's `timeout` is one request's; the call around it ends so much later."""
IGNORED = ("type", "enable_global_rate_limit", "use_mcp")
"""Keys that choose between ways of working of which there is one here."""
ELSEWHERE = ("sandbox_fusion_url", "default_language", "memory_limit_mb")
"""Settings for the place and the way in which verl runs code; here the recipe's `sandbox` determines both."""
LIMITS = ("rate_limit", "num_workers")
log = logging.getLogger(__name__)


def from_verl(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `ToolConfig`. Raises `ValueError` naming the class or key that has no counterpart."""
    rest = dict(entry)
    class_name, config = str(rest.pop("class_name")), dict(rest.pop("config", None) or {})
    schema, mcp = rest.pop("tool_schema", None), dict(rest.pop("mcp", None) or {})
    for key in IGNORED:
        config.pop(key, None)
    if not class_name.startswith("verl."):
        fields = {"name": class_name, **_concurrency(config), "settings": config}
    else:
        fields = _counterpart(class_name, config, mcp)
    if schema is not None:
        fields["tool_schema"] = schema
    return {**fields, **rest}


def read_tools(value: Any) -> Any:
    """A recipe's `tools` as a list of entries: a name alone stands for ``{name: …}``, a YAML file for its `tools`, ours
    or verl's.

    Raises `ValueError` naming the file.
    """
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        try:
            value = list(yaml.safe_load(Path(value).read_text())["tools"])
        except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ValueError(f"{value}: no YAML file with a list of tools ({type(error).__name__}: {error})") from error
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return [{"name": entry} if isinstance(entry, str) else entry for entry in entries]


def _counterpart(class_name: str, config: dict[str, Any], mcp: dict[str, Any]) -> dict[str, Any]:
    """The tool of ours in the place of verl's. Takes what it uses out of `config`."""
    kind = class_name.rpartition(".")[2]
    fields = _limits(config)
    if kind == "SearchTool":
        fields |= {"name": "search", "settings": _search(config, fields)}
    elif kind == "SandboxFusionTool":
        fields |= {"name": "python"}
        for key in ELSEWHERE:
            if config.pop(key, None) is not None:
                log.warning("%s: %s has no effect; the recipe's `sandbox` says where code runs", class_name, key)
    elif kind.startswith("MCP"):
        if "mcp_servers_config_path" not in mcp:
            raise ValueError("an MCP tool needs mcp.mcp_servers_config_path")
        settings = {"servers_file": mcp["mcp_servers_config_path"], "select": mcp.get("tool_selected_list")}
        fields |= {"name": "mcp", "settings": settings}
    else:
        raise ValueError(f"{class_name} has no counterpart: write it as a BaseTool and name its own dotted path")
    if config:
        raise ValueError(f"{class_name}: no counterpart of config: {', '.join(config)}")
    return fields


def _limits(config: dict[str, Any]) -> dict[str, Any]:
    timeouts = [float(config.pop(key)) for key in ("timeout", "default_timeout") if key in config]
    return _concurrency(config) | ({"timeout_s": timeouts[0] + MARGIN_S} if timeouts else {})


def _concurrency(config: dict[str, Any]) -> dict[str, Any]:
    limits = [int(config.pop(key)) for key in LIMITS if key in config]
    return {"concurrency": min(limits)} if limits else {}


def _search(config: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if "retrieval_service_url" not in config:
        raise ValueError("SearchTool: config needs retrieval_service_url")
    settings = {"url": config.pop("retrieval_service_url")}
    if "topk" in config:
        settings["topk"] = config.pop("topk")
    if "timeout_s" in fields:
        settings["request_timeout_s"] = fields["timeout_s"] - MARGIN_S
    return settings

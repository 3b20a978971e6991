"""An MCP server over stdio without the SDK, which would send no such lists: `python raw_mcp_server.py JSON`, where JSON
has the `result` or the `error` of a request for its tools."""

from __future__ import annotations

import json
import sys
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["method"] == "initialize":
        version, me = request["params"]["protocolVersion"], {"name": "raw", "version": "1"}
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": me}}
    if request["method"] == "tools/list":
        tools: dict[str, Any] = json.loads(sys.argv[1])
        return tools
    return {"error": {"code": -32601, "message": "unknown method"}}


for line in sys.stdin:
    received = json.loads(line)
    if "id" in received:
        print(json.dumps({"jsonrpc": "2.0", "id": received["id"], **answer(received)}), flush=True)

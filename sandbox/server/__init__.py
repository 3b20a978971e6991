"""`penstock sandbox`: sessions over HTTP, for workers that cannot or should not hold boxes themselves.

    request ─► access (token → caller) ─► quota ─► sessions ─► pool ─► a backend's boxes

`serving` starts it, `app` puts it together; `docs/sandbox.md` lists the routes, /openapi.json describes them.
"""

from penstock.sandbox.server.serving import serve

__all__ = ["serve"]

"""`penstock sandbox`: sessions over HTTP, for workers that cannot or should not hold boxes themselves.

    request ─► access (token → caller) ─► quota ─► sessions ─► pool ─► a backend's boxes

`app.serve` runs it, `app.build_app` puts it together;
`docs/how/sandbox.md` lists the routes, /openapi.json their bodies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

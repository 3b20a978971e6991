#!/bin/bash
cat > service.py <<'END'
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

stored = {}


class Handler(BaseHTTPRequestHandler):
    def do_PUT(self):
        stored[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def do_GET(self):
        found = stored.get(self.path)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(found or b"")


ThreadingHTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
END
nohup python3 service.py > service.log 2>&1 &
for _ in $(seq 100); do
  python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8080), 1)' 2>/dev/null && exit 0
  sleep 0.1
done
exit 1

import urllib.error
import urllib.request


def ask(path, data=None):
    request = urllib.request.Request("http://127.0.0.1:8080" + path, data, method="PUT" if data else "GET")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


ask("/a", b"one")
ask("/b", b"two")
assert (ask("/a"), ask("/b")) == (b"one", b"two")
try:
    ask("/c")
    status = 200
except urllib.error.HTTPError as error:
    status = error.code
assert status == 404, "a key that was never stored is answered"

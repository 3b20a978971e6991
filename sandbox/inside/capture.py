"""Output of one run: read at once so that no writer blocks, kept up to a limit, counted beyond it."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable

CHUNK_BYTES = 65536


class OutputCapture:
    """The first `limit_bytes` of stdout and stderr together; a quarter is kept free for stderr, where tracebacks go."""

    def __init__(self, limit_bytes: int, on_output: Callable[[str, str], None] | None = None) -> None:
        """`on_output(stream, text)` is called with what is kept, as it arrives."""
        self.limit_bytes = limit_bytes
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.total_bytes = 0
        self._on_output = on_output
        streamed = ("stdout", "stderr") if on_output is not None else ()
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in streamed}

    def read_stdout(self, fd: int) -> bool:
        return self._read(fd, self.stdout, "stdout")

    def read_stderr(self, fd: int) -> bool:
        return self._read(fd, self.stderr, "stderr")

    def _read(self, fd: int, buffer: bytearray, name: str) -> bool:
        """One chunk from a non-blocking `fd`; False where none is available."""
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.keep(buffer, data, name)
        return bool(data)

    def keep(self, buffer: bytearray, data: bytes, name: str) -> None:
        self.total_bytes += len(data)
        new = data[: self.limit_bytes - len(buffer)]
        buffer += new
        self._say(name, new)

    def _say(self, name: str, data: bytes, final: bool = False) -> None:
        if self._on_output is not None:
            text = self._decoders[name].decode(data, final)
            if text:
                self._on_output(name, text)

    def finish(self) -> None:
        """Passes on the rest: incomplete characters at the end."""
        for name in self._decoders:
            self._say(name, b"", final=True)

    @property
    def flooded(self) -> bool:
        # A run that writes 16 times its limit is ended; up to there it is only cut.
        return self.total_bytes > max(16 * self.limit_bytes, 8 << 20)

    @property
    def cut(self) -> bool:
        return self.total_bytes > self.limit_bytes

    def texts(self) -> tuple[str, str]:
        """(stdout, stderr) as text, together at most `limit_bytes`; bytes that are no UTF-8 become U+FFFD."""
        for_stderr = max(self.limit_bytes // 4, self.limit_bytes - len(self.stdout))
        stderr = bytes(self.stderr[:for_stderr])
        stdout = bytes(self.stdout[: self.limit_bytes - len(stderr)])
        return stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")


class TailCapture(OutputCapture):
    """The last `limit_bytes` instead of the first: what a long run ended with."""

    def keep(self, buffer: bytearray, data: bytes, name: str) -> None:
        self.total_bytes += len(data)
        buffer += data
        if len(buffer) > 2 * self.limit_bytes:
            del buffer[: -self.limit_bytes]

    def texts(self) -> tuple[str, str]:
        for_stderr = max(self.limit_bytes // 4, self.limit_bytes - len(self.stdout))
        stderr = bytes(self.stderr[-for_stderr:])
        stdout = bytes(self.stdout[-(self.limit_bytes - len(stderr)) :]) if len(stderr) < self.limit_bytes else b""
        return stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")

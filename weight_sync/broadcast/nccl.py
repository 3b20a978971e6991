"""NCCL by its C library, as far as a broadcast needs it: communicators that can be given up at any moment.

torch's own NCCL groups end their process where a member is gone, and a trainer must not end with a rollout server. Here
no call blocks (``blocking = 0``): a communicator is asked for its state, and aborted where a member stays silent.
Declarations are those of nccl.h; the configuration has the fields of NCCL 2.17, which later versions take as it is.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNDEFINED = -(2**31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700
POLL_S = 0.0005


class NcclError(RuntimeError):
    """A call failed, or a member is gone; the communicator cannot be used any more."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


class NcclCommunicator:
    """One member's. Made by `Nccl.join`; `abort` ends it, whatever it does."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @property
    def busy(self) -> bool:
        """True while a call is being set up. False once a broadcast is posted on its stream, before its bytes arrive.

        Raises `NcclError` if a call failed or a member is gone.
        """
        state = ctypes.c_int(_SUCCESS)
        _check(self._library, self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        if state.value not in (_SUCCESS, _IN_PROGRESS):
            _check(self._library, state.value)
        return state.value == _IN_PROGRESS

    def broadcast(self, address: int, nbytes: int, stream: int | None) -> None:
        """Sends from rank 0's memory at `address` to all others', on the CUDA stream.

        Returns before it is posted there: see `busy`.
        """
        arguments = (address, address, nbytes, _UINT8, 0, self._handle, stream)
        code = self._library.ncclBroadcast(*arguments)
        if code != _IN_PROGRESS:
            _check(self._library, code)

    def abort(self) -> None:
        """End running calls; the calls of other members fail. Called once."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.ncclCommAbort(handle)


class Nccl:
    """The library, as this process has it."""

    path: ClassVar[str] = "libnccl.so.2"
    """torch's builds for GPUs have loaded it."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` if there is none."""
        library = ctypes.CDLL(path)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetErrorString.argtypes = [integer]
        library.ncclGetVersion.argtypes = [ctypes.POINTER(integer)]
        library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(pointer), integer, _UniqueId, integer, ctypes.POINTER(_Config)
        ]  # fmt: skip
        library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(integer)]
        library.ncclBroadcast.argtypes = [pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer]
        library.ncclCommAbort.argtypes = [pointer]
        self._library = library

    @classmethod
    @cache
    def load(cls) -> Nccl:
        """Raises `OSError`."""
        return cls(cls.path)

    @property
    def version(self) -> str:
        """``2.27.3``: members of one group must have the same."""
        code = ctypes.c_int()
        _check(self._library, self._library.ncclGetVersion(ctypes.byref(code)))
        return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"

    def unique_id(self) -> bytes:
        """Names a group to come; rank 0 makes it and sends it to the others."""
        unique = _UniqueId()
        _check(self._library, self._library.ncclGetUniqueId(ctypes.byref(unique)))
        return bytes(unique)

    def join(
        self, size: int, unique_id: bytes, rank: int, forming_s: float, stops: threading.Event | None = None
    ) -> NcclCommunicator:
        """Return a communicator on the current device, once all members are there. Raises `NcclError`, also after
        `forming_s` and if this process `stops`.
        """
        # A broadcast takes 4 blocks of a GPU: the engine decodes on the others.
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, 1, 4, None)
        handle, name = ctypes.c_void_p(), _UniqueId.from_buffer_copy(unique_id)
        arguments = (ctypes.byref(handle), size, name, rank, ctypes.byref(config))
        code = self._library.ncclCommInitRankConfig(*arguments)
        if code != _IN_PROGRESS:
            _check(self._library, code)
        joined = NcclCommunicator(self._library, handle)
        try:
            until_idle(lambda: joined.busy, forming_s, stops)
        except BaseException:
            joined.abort()
            raise
        return joined


def until_idle(busy: Callable[[], bool], silence_s: float, stops: threading.Event | None = None) -> None:
    """Return once no call is in progress. Raises `NcclError` after `silence_s` and if this process `stops`, and what
    `busy` raises."""
    give_up_at = time.monotonic() + silence_s
    while busy():
        if stops is not None and stops.is_set():
            raise NcclError("the trainer stops")
        if time.monotonic() > give_up_at:
            raise NcclError(f"a member of the group was silent for {silence_s:g} s")
        time.sleep(POLL_S)  # in the thread of a transfer: NCCL's state can only be polled


def _check(library: Any, code: int) -> None:
    if code != _SUCCESS:
        raise NcclError(f"NCCL: {library.ncclGetErrorString(code).decode(errors='replace')}")

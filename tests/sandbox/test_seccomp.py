from __future__ import annotations

import struct

import pytest

from penstock.sandbox.seccomp import build_filter

ALLOW, IGNORED, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050000, 0x00050001, 0x00050026, 0x80000000
X86_64, AARCH64 = 0xC000003E, 0xC00000B7


def decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Run the filter as the kernel would."""
    steps = list(struct.iter_unpack("=HBBI", program))
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            position += value
        else:
            hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: accumulator & value != 0}[code]
            position += if_true if hit else if_false


@pytest.mark.parametrize(
    ("number", "argument", "expected"),
    [
        (0, 0, ALLOW),
        (59, 0, ALLOW),
        (56, 0x11, ALLOW),
        (56, 0x10000011, EPERM),
        (435, 0, ENOSYS),
        (101, 0, EPERM),
        (272, 0, EPERM),
        (425, 0, EPERM),
        (438, 0, EPERM),
        (41, 1, ALLOW),
        (41, 2, ALLOW),
        (41, 40, EPERM),
        (41, 38, EPERM),
        (0x40000000, 0, EPERM),
    ],
)
def test_seccomp_x86_64(number: int, argument: int, expected: int) -> None:
    program = build_filter("x86_64")
    assert program is not None
    assert decide(program, X86_64, number, argument) == expected


@pytest.mark.parametrize(
    ("machine", "arch", "numbers", "fadvise", "preadv2"),
    [("x86_64", X86_64, (253, 294, 27, 451), 221, 327), ("aarch64", AARCH64, (26, 232, 451), 223, 286)],
)
@pytest.mark.parametrize("countable", [False, True])
def test_seccomp_page_cache_is_not_asked(machine, arch, numbers, fadvise, preadv2, countable) -> None:
    """Boxes share the pages of /usr: inotify, mincore, posix_fadvise, cachestat and RWF_NOWAIT tell who read what."""
    program = build_filter(machine, countable=countable)
    assert program is not None
    assert {decide(program, arch, number) for number in numbers} == {EPERM}
    assert decide(program, arch, fadvise) == IGNORED
    assert decide(program, arch, preadv2, 3, 0, 1, 0, 0, 8) == EPERM
    assert decide(program, arch, preadv2, 3, 0, 1, 0, 0, 0) == ALLOW


def test_seccomp_aarch64_and_foreign_architectures() -> None:
    program = build_filter("aarch64")
    assert program is not None
    assert [decide(program, AARCH64, n) for n in (63, 117, 97, 280)] == [ALLOW, EPERM, EPERM, EPERM]
    assert [decide(program, AARCH64, 198, family) for family in (2, 40)] == [ALLOW, EPERM]
    assert decide(program, X86_64, 0) == KILL
    assert build_filter("sparc") is None


UNCOUNTABLE = [  # call, its arguments, whether a filter for counted memory allows it
    ((9, 0, 4096, 3, 0x22), True),  # a private map
    ((9, 0, 4096, 3, 0x01), True),  # a file's, shared
    ((9, 0, 4096, 3, 0x21), False),
    ((9, 0, 4096, 3, 0x23), False),
    ((9, 0, 4096, 3, 0x40022), False),
    *(((number,), False) for number in (319, 447, 29, 68, 64, 278)),
    ((41, 1, 0x80001), True),
    ((41, 1, 5), True),
    ((41, 1, 0x80002), False),
    ((41, 1, 3), False),
    ((53, 1, 1), True),
    ((53, 1, 2), False),
    *(((41, family, 2, protocol), True) for family in (2, 10) for protocol in (0, 6, 17)),
    *(((41, family, 2, protocol), False) for family in (2, 10) for protocol in (1, 58, 136, 262)),
    ((41, 16, 3, 4), True),
    ((41, 40, 1, 0), False),
    ((56, 0x10000011), False),
    ((56, 0x3D0F00), True),  # a thread
    ((56, 0x4111), True),  # vfork()
    ((56, 0x511), False),  # the files of another process
    *(((72, 3, command), True) for command in (5, 6, 7, 36, 1031)),
    *(((72, 3, command), False) for command in (37, 38)),
    ((302, 0), True),
    ((302, 1), False),
    ((0,), True),
]


@pytest.mark.parametrize(("call", "allowed"), UNCOUNTABLE)
def test_seccomp_memory_that_cannot_be_counted(call: tuple[int, ...], allowed: bool) -> None:
    program = build_filter("x86_64", countable=True)
    assert program is not None
    assert decide(program, X86_64, *call) == (ALLOW if allowed else EPERM)

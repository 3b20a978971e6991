"""Folders where every user may write: what another user may have put there is refused, what we put there is ours."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.weight_sync.conftest import TOKEN, OpenRoute, small_tensors

torch = pytest.importorskip("torch")

from penstock.common import NotPrivate
from penstock.weight_sync import Downloader, WeightPublisher, WeightsRefused, WeightsUnreachable, read_verified

pytestmark = pytest.mark.torch


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


def test_what_is_published_is_its_users_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        WeightPublisher(tmp_path / "new" / "published", "shm").write(1, small_tensors().items())
    finally:
        os.umask(umask)
    assert modes(tmp_path / "new" / "published") == {0o600}
    assert modes(tmp_path) - {0o600} == {0o700}, "parents that are made on the way too"


def test_a_folder_on_a_shared_disk_is_made_where_it_is_missing(tmp_path: Path) -> None:
    """Those above it are that disk's matter."""
    folder = tmp_path / "run" / "weights"
    WeightPublisher(folder, "disk").write(1, small_tensors().items())
    assert (stat.S_IMODE(folder.stat().st_mode), len(list(folder.iterdir()))) == (0o700, 1)


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def elsewhere(folder: Path) -> None:
    folder.with_name("theirs").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("theirs"))


@pytest.mark.parametrize("squat", [open_to_others, elsewhere])
async def test_a_squatted_folder_is_refused(
    tmp_path: Path, open_route: OpenRoute, squat: Callable[[Path], None]
) -> None:
    squat(tmp_path / "taken")
    with pytest.raises(NotPrivate, match=f"{tmp_path}/taken.*owner uid {os.geteuid()}"):
        WeightPublisher(tmp_path / "taken", "shm")
    manifest = (await open_route("http")).publish(1, small_tensors())
    with pytest.raises(WeightsUnreachable, match=f"{tmp_path}/taken"):
        await asyncio.to_thread(Downloader(tmp_path / "taken", TOKEN).localise, manifest)


def test_a_link_in_the_place_of_a_version_is_refused(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path / "published", "shm").write(1, small_tensors().items())
    path = Path(manifest.place)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsRefused, match="symbolic link"):
        read_verified(manifest)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(WeightsRefused, match="not a regular file"):
        read_verified(manifest)


async def test_a_fetched_file_is_not_trusted_for_its_name(tmp_path: Path, open_route: OpenRoute) -> None:
    """Exchanged while the server lives, and before its next life."""
    manifest = (await open_route("http")).publish(1, small_tensors())
    first = Downloader(tmp_path / "s0", TOKEN)
    path = Path((await asyncio.to_thread(first.localise, manifest)).place)
    good = path.read_bytes()
    for downloader in (first, Downloader(tmp_path / "s0", TOKEN)):
        path.unlink()
        path.write_bytes(b"\0" * len(good))
        await asyncio.to_thread(downloader.localise, manifest)
        assert path.read_bytes() == good
    again = Downloader(tmp_path / "s0", TOKEN)
    await asyncio.to_thread(again.localise, manifest)
    assert again.bytes_received["trainer"] == 0, "what an earlier life fetched rightly is kept"
    path.unlink()
    path.symlink_to(tmp_path / "published" / manifest.files[-1].name)
    with pytest.raises(WeightsUnreachable, match="links"):
        await asyncio.to_thread(again.localise, manifest)

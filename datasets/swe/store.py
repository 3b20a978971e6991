"""A git repository that holds trees of files, each as one commit without a past: what a task's box is filled from.

The same files always make the same commit, whenever and wherever: ids name contents.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

DEADLINE_S = 120
_ENVIRONMENT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C", "PATH": "/usr/bin:/bin"}
Files = Mapping[str, bytes]
"""path → content; a path that is executable ends up as a plain file"""


class GitFailed(RuntimeError):
    """git could not be run, or said no; the text is its own."""


class TreeStore:
    """Made if it is not there yet. `folder` is the repository itself, without a work tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "HEAD").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            self._git("init", "-q", "--bare", "--template=", "--initial-branch=none", ".")

    def commit(self, name: str, files: Files) -> str:
        """Id of the commit that `refs/tasks/NAME` is from now on. Raises `GitFailed`."""
        reference = f"refs/tasks/{name}"
        committer = b"snapshot <snapshot@localhost> 946684800 +0000"
        parts = [b"commit %s\ncommitter %s\ndata 8\nsnapshot\n" % (reference.encode(), committer)]
        for path, content in sorted(files.items()):
            quoted = '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
            parts.append(b"M 100644 inline %s\ndata %d\n%s\n" % (quoted.encode(), len(content), content))
        self._git("fast-import", "--quiet", "--force", "--date-format=raw", stdin=b"".join(parts))
        return self._git("rev-parse", reference).decode().strip()

    def diff(self, before: str, after: str) -> bytes:
        """The patch that makes one commit's files of another's. Raises `GitFailed`."""
        how = ("--binary", "--full-index", "--no-renames", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
        return self._git("diff-tree", "-r", "-p", *how, before, after)

    def forget(self, name: str) -> None:
        """`pack` leaves its commit out, unless another name has it too. Raises `GitFailed`."""
        self._git("update-ref", "-d", f"refs/tasks/{name}")

    def pack(self) -> None:
        """Packs every named object into one file and removes all others."""
        self._git("repack", "-adq")
        self._git("prune", "--expire=now")

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        command = ["git", "-c", "safe.directory=*", "-c", "core.quotePath=true", *arguments]
        where = {**_ENVIRONMENT, "GIT_DIR": str(self.folder.absolute())}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=where, input=stdin, capture_output=True, timeout=DEADLINE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GitFailed(f"git {arguments[0]}: {error}") from error
        if done.returncode != 0:
            raise GitFailed(f"git {arguments[0]}: {done.stderr.decode('utf-8', 'replace').strip()}")
        return done.stdout

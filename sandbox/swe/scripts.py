"""Scripts for git in a box, as POSIX shell. Each script begins with `BEGIN`: ``sh -c TEXT swe STATE FOLDER …``.

STATE/base.git is the snapshot's own git directory. The model sees a copy of it as FOLDER/.git, and may do with that
what it likes: the patch is taken against base.git. Its ``info/attributes`` switch off every conversion, so that what
is stored, compared and checked out is the bytes of the files.
"""

from __future__ import annotations

BEGIN = """\
set -eu
state=$1 folder=$2
shift 2
cd -- "$folder"
g() {
  env GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent LC_ALL=C git \
    -c core.excludesFile=/dev/null -c core.attributesFile=/dev/null -c core.fsmonitor=false \
    -c core.hooksPath=/dev/null -c core.autocrlf=false -c core.quotePath=true -c core.safecrlf=false \
    --git-dir="$state/base.git" --work-tree="$folder" "$@"
}
"""

JOIN = 'cat "$state"/part.* > "$state/$1"; rm -f "$state"/part.*'

PACKAGES = 'rm -rf "$state/packages"; mkdir -p "$state/packages"; tar -xzf "$1" -C "$state/packages"; rm -f "$1"'

UNPACK = 'tar -xzf "$1" -C "$folder"; rm -f "$1"'

COPY = """\
if [ ! -d "$1" ]; then echo "the image has no folder $1" >&2; exit 1; fi
if [ -e "$1/.git" ]; then echo "$1/.git is in the image: its history may hold the solution" >&2; exit 1; fi
cp -RPp "$1/." "$folder"
"""
"""Copies a repository that an image has. Images are read-only: history in one cannot be removed here."""

BASE = """\
rm -rf .git
touch -d @0 "$state/newest"
find . -type f -exec sh -c 'newest=$0
for one; do if [ "$one" -nt "$newest" ]; then newest=$one; fi; done
touch -r "$newest" "$0"' "$state/newest" {} +
touch -d "@$(($(stat -c %Y "$state/newest") + 1))" "$state/newest"
g init -q --template=
mkdir -p "$state/base.git/info"
printf '* -text -ident !eol !crlf !filter !working-tree-encoding !diff\\n' > "$state/base.git/info/attributes"
printf '%s\\n' '__pycache__/' '*.pyc' '.pytest_cache/' '.penstock_*' > "$state/base.git/info/exclude"
g add -A -f .
export GIT_AUTHOR_NAME=snapshot GIT_AUTHOR_EMAIL=snapshot@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=snapshot GIT_COMMITTER_EMAIL=snapshot@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
commit=$(g commit-tree -m snapshot "$(g write-tree)")
g symbolic-ref HEAD refs/heads/main
g update-ref refs/heads/main "$commit"
g repack -a -d -q
rm -rf "$state/base.git/logs"
cp -R "$state/base.git" .git
rm -f .git/info/attributes
for pair in core.bare=false user.name=agent user.email=agent@localhost; do
  git --git-dir=.git config "${pair%%=*}" "${pair#*=}"
done
git --git-dir=.git config --unset core.worktree || true
"""
"""One commit, whose author and date are the same each time: so is its id. ``newest`` has the first whole second after
the newest file."""

DIFF = """\
export GIT_INDEX_FILE="$state/diff.index"
rm -f "$GIT_INDEX_FILE"
g read-tree refs/heads/main
set -- .
IFS='
'
for nested in $(find . -mindepth 2 -name .git); do
  nested=${nested#./}
  set -- "$@" ":(exclude,literal)${nested%/.git}"
done
g add -A -- "$@"
g diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color --ignore-submodules=all \
  --src-prefix=a/ --dst-prefix=b/ refs/heads/main > "$state/diff.patch"
"""

APPLY = 'g apply --binary --whitespace=nowarn "$1"'

ENTRIES = """\
export GIT_INDEX_FILE="$state/entries.index"
rm -f "$GIT_INDEX_FILE"
g read-tree refs/heads/main
if [ -s "$1" ]; then g apply --cached --binary --whitespace=nowarn "$1"; fi
g diff --cached --raw -z --no-renames --no-abbrev --ignore-submodules=none refs/heads/main > "$state/entries"
"""
"""Lists the changes that a patch makes to the snapshot. In an index: no symlink of a patch leads anywhere."""

CHECK_OUT = """\
export GIT_INDEX_FILE="$state/final.index"
rm -f "$GIT_INDEX_FILE"
g read-tree refs/heads/main
g update-index -z --replace --index-info < "$1"
tree=$(g write-tree)
unset GIT_INDEX_FILE
g read-tree --reset -u "$tree"
"""

STAMP = """\
find . -newer "$state/newest" -exec touch -c -h -m -r "$state/newest" -- {} +
find . -exec touch -c -h -a -d @4102444800 -- {} +
"""
"""Gives what was written over the snapshot one time, the same in each box and later than what an image has built: how
long writing took differs from box to box. All times of access lie ahead (the year 2100), so reading leaves them as they
are: the ticks in which two files were read differ from box to box too."""

SCRUB = 'find "$state" -mindepth 1 -maxdepth 1 ! -name packages -exec rm -rf -- {} +'
"""Nothing in a grading box but the test files themselves reveals the hidden tests."""

NAMES = 'find . -path ./.git -prune -o \\( -type f -o -type l \\) -print0 > "$state/names"'
"""Names of the files and links of the repository."""

SEAL = 'tar -cf - --no-recursion -T "$1" | sha256sum > "$state/seal"'
"""One number for the names, contents, kinds and times of the listed files."""

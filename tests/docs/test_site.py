"""The site as it is built: no warning, no other host, no link into nothing, every page in the menu."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import yaml
from scripts.reference.pages import write
from tests.docs.pages import GENERATED, PAGES, ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
RESOURCES = {**dict.fromkeys(("script", "img", "iframe", "source", "video"), "src"), "object": "data", "use": "href"}
NOT_FETCHED = {"canonical", "next", "prev", "alternate", "license", "author"}
"""What a `<link>` may be without being loaded."""
IN_CSS = re.compile(r"(?:url\(|@import)\s*['\"]?([^'\")]+)")


class Page(HTMLParser):
    """Resources, links and anchors of one page, and paragraphs that were meant to be something else."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.resources: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.left_as_text: list[str] = []
        self._in_paragraph = self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.classes |= set(given.get("class", "").split())
        self._in_paragraph = tag == "p"
        self._in_cell = tag == "td" or (self._in_cell and tag == "code")
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and not set(given.get("rel", "").split()) & NOT_FETCHED:
            self.resources.append(given.get("href", ""))
        if RESOURCES.get(tag, "") in given:
            self.resources.append(given[RESOURCES[tag]])
        self.resources += IN_CSS.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Tables and blocks that Markdown did not see are paragraphs with marks; a bar in a cell has a backslash."""
        if (self._in_paragraph and re.match(r"\s*(\| .* \||```)", data)) or (self._in_cell and "\\|" in data):
            self.left_as_text.append(data)
        self._in_paragraph = False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `scripts/docs` does, in a folder of its own."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: pip install 'penstock[docs]'")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    write(folder / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file.resolve(): Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}


def test_every_page_of_docs_is_built(site: Path) -> None:
    made = {str(file.relative_to(site).with_suffix("")) for file in site.rglob("*.html")}
    assert {str(file.relative_to(DOCS).with_suffix("")) for file in DOCS.rglob("*.md")} <= made


def test_every_page_is_in_the_menu() -> None:
    in_menu = list(_leaves(yaml.safe_load(CONFIG)["nav"]))
    there = {page.removeprefix("docs/") for page in (*PAGES, *GENERATED) if page.startswith("docs/")}
    assert len(in_menu) == len(set(in_menu))
    assert there - set(in_menu) == set(), "add to (or uncomment in) nav of mkdocs.yml"
    assert set(in_menu) - there == set(), "in nav of mkdocs.yml, but not in docs/"


def _leaves(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _leaves(child)


def test_no_other_host_is_asked_for_anything(site: Path, pages: dict[Path, Page]) -> None:
    asked = {(file.name, one) for file, page in pages.items() for one in page.resources if _is_foreign(one)}
    assert asked == set()
    in_css = {
        (css.name, one) for css in site.rglob("*.css") for one in IN_CSS.findall(css.read_text()) if _is_foreign(one)
    }
    assert in_css == set()
    assert not any("mermaid" in page.classes for page in pages.values()), (
        "its script comes from another host: draw an SVG"
    )


def _is_foreign(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else file.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append((file.name, link))
    assert broken == []


def test_tables_and_blocks_are_what_they_were_meant_to_be(pages: dict[Path, Page]) -> None:
    assert {file.name: page.left_as_text for file, page in pages.items() if page.left_as_text} == {}


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md"])
def test_links_of_pages_outside_the_site(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link, _ in links if not _is_foreign(link) and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda picture: picture.stem)
def test_pictures_are_whole_used_and_need_nothing(picture: Path) -> None:
    tree = ElementTree.parse(picture)
    names = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert {"title", "desc"} <= names, "for those who cannot see it"
    assert not names & {"script", "image", "foreignObject"}
    values = [value for element in tree.iter() for value in [*element.attrib.values(), element.text or ""]]
    assert [value for value in values if "http" in value or "url(" in value.replace("url(#", "")] == []
    assert any(picture.name in page.read_text() for page in DOCS.rglob("*.md"))

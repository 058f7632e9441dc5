"""README and docs: links lead somewhere, and every page is reached."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "BENCHMARKS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of its headings, as both a forge and a site make them."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))
    for link in links:
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT) and target.is_file(), f"{link}: name a file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_site_has_every_page_and_every_file_that_is_linked(tmp_path: Path) -> None:
    maker = runpy.run_path(str(ROOT / "scripts" / "stage_docs.py"))
    maker["stage"](tmp_path)
    menu = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(tmp_path / page for page in menu) == sorted(tmp_path.rglob("*.md"))
    for page in menu:
        for link in re.findall(r"\]\(([^)\s#]+)", without_code((tmp_path / page).read_text(encoding="utf-8"))):
            assert link.startswith("http") or ((tmp_path / page).parent / link).is_file(), f"{page}: {link}"


def test_readme_stays_short() -> None:
    """What a verb does stands in docs."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140

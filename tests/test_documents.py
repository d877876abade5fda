"""Documents name what there is: links lead somewhere, named files exist, and measurements say of what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.programs import ROOT

FOLDERS = ("cpp", "python", "tests", "bench", "tools", "cmake", "models")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("models/*/README.md")),
         ROOT / "python/echo/data/traces/README.md"]  # fmt: skip
MEASUREMENTS = sorted((ROOT / "docs/measurements").glob("*.md"))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def text_of(page: Path) -> str:
    """Without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_files_that_documents_name_exist():
    """By their names alone, or with folders from the root on."""
    files = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    missing = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`([\w/.]+\.(?:cuh?|hpp|cpp|py|sh|cmake))`", text_of(page))
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
    }
    assert not missing


def test_documents_that_code_names_exist():
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cu", ".cuh", ".hpp", ".cpp", ".py", ".sh"):
                found |= set(re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8")))
    assert "docs/measurements/score.md" in found
    assert [name for name in found if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", MEASUREMENTS, ids=[page.name for page in MEASUREMENTS])
def test_sections_of_measurements_say_of_what_they_are(page):
    """Machine, commit and protocol come first, in italics."""
    for section in re.split(r"^## ", text_of(page), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        assert title == "How it is measured" or re.match(r"\s*\*(H200|No GPU)[,;]", body), title

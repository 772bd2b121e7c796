"""Every link in the documentation leads somewhere, and every page is in the site's navigation."""

from __future__ import annotations

import posixpath
from pathlib import Path

import pytest
from docs_site import markdown, pages

PAGES = pages.pages()
IN_FOLDERS = ("*.md", "docs/**/*.md", "deploy/**/*.md", "scripts/*/README.md", "packages/*/README.md")


def place_of(page: str, target: str) -> str:
    """Where a link of a page leads, from the root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))


def broken(page: str, root: Path = pages.ROOT) -> list[str]:
    """Links of a page that lead nowhere; addresses on the network are not asked."""
    found = []
    text = (root / page).read_text()
    for line, target in markdown.links(text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://", "mailto:")):
            continue
        place = root / (place_of(page, path) if path else page)
        if posixpath.isabs(path) or not place.resolve().is_relative_to(root):
            found.append(f"{page}:{line}: {target} leads out of the repository")
        elif not place.exists():
            if not pages.is_left_out(place_of(page, path), root):
                found.append(f"{page}:{line}: {target}: there is no such file")
        elif anchor and (place.suffix != ".md" or anchor not in markdown.anchors(place.read_text())):
            found.append(f"{page}:{line}: {target}: there is no such heading")
    return found


def test_links_lead_somewhere() -> None:
    assert [fault for page in PAGES for fault in broken(page)] == []


def test_every_page_is_in_the_navigation() -> None:
    found = [path for folder in IN_FOLDERS for path in pages.ROOT.glob(folder)]
    there = {path.relative_to(pages.ROOT).as_posix() for path in found}
    assert there - set(PAGES) == set()


def test_every_page_has_one_heading_of_the_first_kind() -> None:
    for page in PAGES:
        lines = [part for part in markdown.parts((pages.ROOT / page).read_text()) if isinstance(part, str)]
        assert len([line for line in lines if line.startswith("# ")]) == 1, page


def test_every_page_is_reached_from_another() -> None:
    reached = set()
    for page in PAGES:
        for _, target in markdown.links((pages.ROOT / page).read_text()):
            reached.add(place_of(page, target))
    reached |= {f"{place}/{pages.HOME}" for place in reached}  # a folder shows its README
    assert set(PAGES) - reached - {pages.HOME} == set()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository of three pages and a folder."""
    files = {
        "README.md": "# Home\n\n[one](docs/start.md) and [files](deploy/serve)\n",
        "docs/start.md": "# One\n\n## It's `a b` here\n\n"
        "[home](../README.md), [below](#its-a-b-here), [no](media.md)\n",
        "docs/omni.md": "# Two\n\n[code](../x.py), [one](start.md#its-a-b-here)\n\n```\n[no](link.md)\n```\n"
        "<!-- [not\n](yet.md) -->\n",
        "deploy/serve/two.yaml": "workers: []\n",
        "x.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_good_links_pass(small: Path) -> None:
    assert [broken(page, small) for page in pages.pages(small)] == [[], [], []]


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("nope.md", "there is no such file"),
        ("start.md#nope", "there is no such heading"),
        ("#nope", "there is no such heading"),
        ("../x.py#nope", "there is no such heading"),
        ("../../../etc", "leads out of the repository"),
        ("/docs/start.md", "leads out of the repository"),
    ],
)
def test_bad_link_is_found_with_its_line(small: Path, link: str, fault: str) -> None:
    (small / "docs" / "omni.md").write_text(f"# Two\n\n`[no](in-code.md)` [x]({link})\n")
    (found,) = broken("docs/omni.md", small)
    assert found == f"docs/omni.md:3: {link}{' ' if 'out' in fault else ': '}{fault}"

"""The audit of locked packages, over a real index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import audit
import pytest
from audit import Release

from harness.json_server import answering

BAD = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["2.0"], "link": "https://osv.dev/PYSEC-1"}
KNOWN = f"/pypi/{'/'.join(audit.KNOWN_TO_BE_BAD)}/json"


@pytest.fixture
def pages() -> dict[str, Any]:
    """Advisories by the page that has them."""
    return {KNOWN: [BAD]}


@pytest.fixture
def index(pages: dict[str, Any]) -> Iterator[str]:
    def answer(path: str, _: None) -> tuple[int, Any]:
        return (200 if pages.get(path) is not None else 404), {"vulnerabilities": pages.get(path)}

    with answering(answer) as url:
        yield url


def test_each_advisory_that_stands_is_told(index: str, pages: dict[str, Any]) -> None:
    pages |= {
        "/pypi/good/1.0/json": [],
        "/pypi/bad/1.0/json": [BAD, {**BAD, "id": "PYSEC-2", "withdrawn": "2026-01-01T00:00:00Z"}],
        "/pypi/open/1.0/json": [{**BAD, "fixed_in": []}],
    }
    found = audit.audit(index, [Release(name, "1.0") for name in ("good", "bad", "open", "absent")])
    assert found == [
        "bad 1.0: PYSEC-1, CVE-1; fixed in 2.0; https://osv.dev/PYSEC-1",
        "open 1.0: PYSEC-1, CVE-1; fixed in no release yet; https://osv.dev/PYSEC-1",
        "absent 1.0: not judged, the index does not have it",
    ]


@pytest.mark.parametrize("page", [None, []])
def test_index_without_advisories_is_no_good_news(
    index: str, pages: dict[str, Any], page: list[Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pages[KNOWN] = page
    assert audit.main(["--url", index]) == audit.NOT_DONE
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"nothing was audited: what answers as {index} has no")
    assert said.err.count("\n") == 1


def test_every_lock_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# made by hand\none==1.0\ntwo==2.0 ; python_version <= '3.11'\n")
    (tmp_path / "b.txt").write_text("one==1.0\none==1.1 ; python_version >= '3.12'\n")
    found = [("one", "1.0"), ("one", "1.1"), ("two", "2.0")]
    assert audit.locked(tmp_path) == [Release(*each) for each in found]
    assert len(audit.locked(audit.LOCKS)) > 100

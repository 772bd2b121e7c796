"""data: and file: URLs, and what no URL may have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.fetch.file_urls import read_file
from dynamo_vllm.media.fetch.http import Hop, read_data_url
from harness.media import data_url

LIMIT = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "media"
    (made / "sub").mkdir(parents=True)
    (made / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "x").write_bytes(b"outside")
    (made / "out").symlink_to(tmp_path / "secret")
    (made / "up").symlink_to(tmp_path)
    (made / "in").symlink_to(made / "a b.png")
    (made / "loop").symlink_to(made / "loop")
    os.mkfifo(made / "pipe")
    (made / "big").write_bytes(bytes(LIMIT + 1))
    return made


def refusal(url: str, folder: Path | None) -> tuple[int, str]:
    with pytest.raises(MediaRefused) as caught:
        read_file(url, folder, LIMIT)
    return caught.value.status, str(caught.value)


def test_file_below_the_folder_is_read(folder: Path, tmp_path: Path) -> None:
    for name in ("a%20b.png", "in", "sub/../a%20b.png"):
        for host in ("", "localhost"):
            assert read_file(f"file://{host}{folder}/{name}", folder, LIMIT) == b"inside"
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert read_file(f"file://{link}/in", link, LIMIT) == b"inside", "the folder itself may be a link"


def test_file_outside_is_not_read_nor_told_of(folder: Path) -> None:
    names = """../secret %2e%2e/secret ..%2fsecret sub/../../secret out up/secret ../media-too/x ../nothing
        up/nothing /../../../../../../etc/passwd"""
    for name in names.split():
        outside = (400, "the file is not below the folder that this worker may read")
        assert refusal(f"file://{folder}/{name}", folder) == outside, name


@pytest.mark.parametrize(
    ("url", "status", "match"),
    [
        ("file://{}/nothing", 400, "no such file"),
        ("file://{}/loop", 400, "no such file"),
        ("file://{}/pipe", 400, "not a regular file"),
        ("file://{}/sub", 400, "not a regular file"),
        ("file://{}/big", 413, "larger than"),
        ("file://{}/a%00b", 400, "not a file URL"),
        ("file://{}/a%20b.png?x=1", 400, "not a file URL"),
        ("file://host/a", 400, "not a file URL"),
        ("file:a", 400, "not a file URL"),
        ("file:", 400, "not a file URL"),
        ("file://%2fetc/passwd", 400, "not a file URL"),
        ("file:///%ff", 400, ""),
        ("file://[", 400, ""),
    ],
)
def test_what_is_no_good_file_is_refused(folder: Path, url: str, status: int, match: str) -> None:
    got, text = refusal(url.format(folder), folder)
    assert got == status and match in text


def test_no_folder_means_no_files(folder: Path) -> None:
    assert "--media-folder" in refusal(f"file://{folder}/in", None)[1]


def test_folder_that_becomes_a_link_after_the_check_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of the path and the opening, a folder on the way is swapped."""
    (folder / "sub" / "secret").write_bytes(b"inside")
    really = os.open

    def swapped(path: Path, flags: int) -> int:
        os.rename(folder / "sub", folder / "old")
        (folder / "sub").symlink_to(folder.parent)
        return really(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    assert "not below the folder" in refusal(f"file://{folder}/sub/secret", folder)[1]


def test_data_url_is_base64() -> None:
    assert read_data_url(data_url(b"abc"), LIMIT) == b"abc"
    assert read_data_url("DATA:;charset=x;BASE64,YWJj", LIMIT) == b"abc"
    assert len(read_data_url(data_url(bytes(LIMIT)), LIMIT)) == LIMIT


def test_other_data_urls_are_refused() -> None:
    png = "data:image/png"
    broken = [f"{png},abc", f"{png};base64", f"{png};base64,a$b=", f"{png};base64,YWJ"]
    large = [data_url(bytes(LIMIT + more)) for more in (1, 10)]
    for url in (*broken, "data:image/svg+xml;utf8,<svg/>", *large):
        with pytest.raises(MediaRefused) as caught:
            read_data_url(url, LIMIT)
        assert caught.value.status == (413 if url in large else 400)


def test_what_is_no_plain_url_is_refused() -> None:
    refusals = {
        "user name": ["http://user@example.com/", "http://user:secret@example.com/"],
        "user name|not a URL": ["http://a\\@example.com/"],
        "ftp: is not supported": ["ftp://example.com/"],
        "gopher: is not supported": ["gopher://example.com/"],
        "nothing: is not supported": ["//example.com/", "/etc/passwd", ""],
        "host": ["http://", "http:///a", "http://exa mple.com/"],
        "not a URL": ["http://example.com\n/"],
        "no valid host or port": ["http://example.com:99999/", "http://example.com:0/"],
    }
    for match, urls in refusals.items():
        for url in urls:
            with pytest.raises(MediaRefused, match=match) as caught:
                Hop.parse(url)
            assert "secret" not in str(caught.value)

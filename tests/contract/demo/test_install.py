"""Tests that trained models are installed into the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import install

from dynamo_vllm.models import demo as models


def make(folder: Path, size: int = 10) -> None:
    (folder / "inner").mkdir(parents=True)
    (folder / "README.md").write_text("card")
    (folder / "inner" / "model.safetensors").write_bytes(b"x" * size)


def test_both_sides_speak_of_the_same_folders() -> None:
    assert install.NAMES == models.NAMES
    assert models.ROOT == install.PACKAGE
    assert models.served_name("chat") == f"{install.PREFIX}chat"


def test_new_models_replace_old_ones_and_others_stay(tmp_path: Path) -> None:
    package = tmp_path / "package"
    make(package / "chat")
    (package / "chat" / "old.json").touch()
    make(package / "image")
    make(tmp_path / "made" / "demo-chat", 20)
    make(tmp_path / "made" / "data")
    assert install.install(tmp_path / "made", package) == [package / "chat"]
    assert sorted(file.name for file in package.iterdir()) == ["chat", "image"]
    assert (package / "chat" / "inner" / "model.safetensors").stat().st_size == 20
    assert not (package / "chat" / "old.json").exists()


def test_too_much_is_refused_and_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "MAX_BYTES", 100)
    package = tmp_path / "package"
    make(package / "image", 60)
    make(tmp_path / "made" / "demo-chat", 60)
    with pytest.raises(SystemExit, match="the demo models have"):
        install.install(tmp_path / "made", package)
    assert [file.name for file in package.iterdir()] == ["image"]


def test_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no demo model"):
        install.install(tmp_path, tmp_path / "package")


def test_scores_of_the_cards_go_into_the_documentation(tmp_path: Path) -> None:
    make(tmp_path / "package" / "chat")
    card = "# demo-chat\n\n## Scores\nGreedy.\n\n| sums | 99 % |\n\n## Limits\nMany.\n"
    (tmp_path / "package" / "chat" / "README.md").write_text(card)
    page = tmp_path / "demo.md"
    page.write_text(f"before\n{install.BEGIN}old\n{install.END}\nafter\n")
    for _ in range(2):
        install.write_scores(page, tmp_path / "package")
        scores = "### demo-chat\nGreedy.\n\n| sums | 99 % |\n"
        assert page.read_text() == f"before\n{install.BEGIN}{scores}{install.END}\nafter\n"


def test_documentation_has_the_scores_of_the_package() -> None:
    page = install.PAGE.read_text(encoding="utf-8")
    assert f"{install.BEGIN}{install.scores()}{install.END}" in page, "run 'python scripts/demo install'"

"""The generated pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from generate import docs

from dynamo_vllm import errors
from dynamo_vllm.cli.main import COMMANDS
from dynamo_vllm.config import build, engine_rules


def test_pages_in_the_repository_are_fresh() -> None:
    assert docs.main(["--check"]) == 0, "run 'make docs'"


@pytest.mark.parametrize("name", ["configuration.md", "cli.md"])
def test_stale_or_missing_page_fails_the_check_and_writing_mends_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    page = tmp_path / "docs" / name
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    page.write_text(page.read_text() + "\nby hand\n")
    assert docs.main(["--check"]) == 1
    assert f"{name} is not what the code says; run 'make docs'" in capsys.readouterr().err


def test_every_option_but_the_hidden_ones_and_every_rule_is_on_the_page() -> None:
    page = docs.page()
    for _, cls, *_ in docs.SECTIONS:
        for item in build.declared(cls):
            assert (f"`{item.option.env}`" in page) is not item.option.hidden
    section = page[page.index("## Engine defaults") : page.index("## Exit codes")]
    assert section.count("\n| `") == len(engine_rules.RULES)
    assert {command.split()[0] for command, *_ in docs.SECTIONS} == set(COMMANDS)


def test_error_page_tells_of_every_class() -> None:
    text = (docs.ROOT / "docs" / "errors.md").read_text()
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]
    assert [cls.__name__ for cls in classes if f"`{cls.__name__}`" not in text] == []

"""The generated page says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_vllm import errors
from dynamo_vllm.cli import docs
from dynamo_vllm.cli.main import COMMANDS
from dynamo_vllm.config import build, engine_rules


def test_page_in_the_repository_is_fresh() -> None:
    assert docs.main(["--check"]) == 0, "run 'make docs'"


def test_page_is_the_same_every_time() -> None:
    assert docs.page() == docs.page()


def test_stale_or_missing_page_fails_the_check_and_writing_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    page = tmp_path / "docs" / "configuration.md"
    monkeypatch.setattr(docs, "PAGE", page)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    page.write_text(page.read_text() + "\nby hand\n")
    assert docs.main(["--check"]) == 1
    assert "run 'make docs'" in capsys.readouterr().err


def test_every_command_has_a_section() -> None:
    assert {command.split()[0] for command, *_ in docs.SECTIONS} == set(COMMANDS)


def test_every_option_but_the_hidden_ones_is_on_the_page() -> None:
    page = docs.page()
    for _, cls, *_ in docs.SECTIONS:
        for item in build.declared(cls):
            assert (f"`{item.option.env}`" in page) is not item.option.hidden


def test_every_rule_is_on_the_page() -> None:
    page = docs.page()
    section = page[page.index("## Engine defaults") : page.index("## Exit codes")]
    assert section.count("\n| `") == len(engine_rules.RULES)


@pytest.mark.parametrize(
    "name",
    [name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)],
)
def test_error_page_tells_of_every_class(name: str) -> None:
    assert f"`{name}`" in docs.PAGE.with_name("errors.md").read_text()

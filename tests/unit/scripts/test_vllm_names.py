"""Names of vLLM that we use, looked up in a release that is not installed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import vllm_names
from vllm_names import State, Use
from vllm_source import Release

FILES = {
    "vllm/__init__.py": "import typing\nif typing.TYPE_CHECKING:\n    from .params import Params\n",
    "vllm/_version.py": "__version__: str\n__version__ = version = '9.1.0'\n",
    "vllm/params.py": "class Params:\n    n: int = 1\n",
    "vllm/engine/__init__.py": "from vllm.engine.base import *\nfrom vllm.engine.llm import Llm as Engine\n",
    "vllm/engine/base.py": (
        "class Base:\n"
        "    def __init__(self):\n"
        "        self.config = None\n"
        "    def abort(self, request_id, internal=False):\n"
        "        '''Ends it.'''\n"
        "        return request_id\n"
    ),
    "vllm/engine/llm.py": (
        "from .base import Base\n"
        "try:\n"
        "    import fast\n"
        "except ImportError:\n"
        "    fast = None\n"
        "class Llm(Base):\n"
        "    def sleep(self, level, *, mode): ...\n"
    ),
}


def write(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(params=["folder", "wheel"])
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Release:
    if request.param == "folder":
        return Release(write(tmp_path))
    with zipfile.ZipFile(tmp_path / "vllm-9.1.0-any.whl", "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return Release(tmp_path / "vllm-9.1.0-any.whl")


def test_names_are_found_through_re_exports_and_base_classes(release: Release) -> None:
    for name in ("Params.n", "engine.llm", "engine.Engine.abort", "engine.Engine.config", "engine.Base"):
        assert vllm_names.judge(Use(f"vllm.{name}", "imported", "x.py"), release).state is State.THERE
    assert vllm_names.judge(Use("vllm.engine.llm.fast", "imported", "x.py"), release).state is State.THERE


def test_what_is_missing_is_named_with_its_new_place(release: Release) -> None:
    verdict = vllm_names.judge(Use("vllm.engine.core.Llm", "imported", "x.py"), release)
    assert (verdict.state, verdict.note) == (State.MISSING, "now in vllm.engine.llm")
    gone = vllm_names.judge(Use("vllm.engine.Engine.wake_up", "described", "Llm"), release)
    assert (gone.state, gone.note) == (State.MISSING, "")
    assert release.version() == "9.1.0"


def test_release_that_lacks_names_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_names.main([str(write(tmp_path))]) == 1
    assert "vLLM 9.1.0: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no package called vllm"):
        Release(tmp_path / "vllm")

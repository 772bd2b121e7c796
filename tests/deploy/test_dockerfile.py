"""The Dockerfile: pinned, non-root, from files that are there, with the packages of scripts/setup.py."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import setup_packages

from dynamo_vllm import __version__
from dynamo_vllm.export.settings import USER
from harness.bad_server import make_certificate
from harness.live import live

ROOT = Path(__file__).parents[2]
HEALTHY = ROOT / "deploy" / "docker" / "healthy.py"
DEVICES = ("cpu", "cuda")
BY_DEVICE = "${DEVICE}-base"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """By name, with the FROM that begins each; what stands before the first has none."""
    name = ""
    found: dict[str, list[tuple[str, str]]] = {name: []}
    for word, rest in instructions():
        if word == "FROM":
            name = rest.split(" AS ")[1]
            found[name] = []
        found[name].append((word, rest))
    return found


def of(stage: str, word: str) -> list[str]:
    return [rest for found, rest in stages()[stage] if found == word]


def in_context(path: Path) -> bool:
    """Whether .dockerignore lets a file through: the last rule that fits decides."""
    kept = True
    name = path.relative_to(ROOT).as_posix()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            rule = line.removeprefix("!").removeprefix("**/")
            fits = fnmatch.fnmatch(name, rule) or name.startswith(f"{rule}/")
            fits = fits or ("**/" in line and any(fnmatch.fnmatch(part, rule) for part in name.split("/")))
            kept = line.startswith("!") if fits else kept
    return kept


def test_bases_are_pinned() -> None:
    outside = [rest.split()[0] for word, rest in instructions() if word == "FROM" and ":" in rest.split()[0]]
    assert len(outside) == 2
    for image in outside:
        tag = image.rpartition(":")[2]
        assert re.search(r"\d+\.\d+\.\d+", tag), f"{image} moves"
    inside = [rest.split()[0] for word, rest in instructions() if word == "FROM" and ":" not in rest]
    assert inside == [BY_DEVICE, BY_DEVICE]


def test_stages_name_the_arguments_they_use() -> None:
    """One that was not named in a stage is empty there, and the build says nothing."""
    for name, lines in stages().items():
        named: set[str] = set()
        for word, rest in lines:
            named |= {rest.partition("=")[0]} if word == "ARG" else set()
            used = {argument for argument in ("DEVICE", "EXTRAS", "VLLM") if f"${argument}" in rest}
            assert used <= named or word == "FROM", f"{name}: {word} {rest}"


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = [rest for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    assert copied
    for rest in copied:
        for source in shlex.split(rest)[:-1]:
            path = ROOT / source
            files = [path] if path.is_file() else [*path.rglob("*.py"), *path.glob("*.txt")]
            assert files, f"{source} is not there"
            assert all(in_context(file) for file in files), f"{source} is ignored"


def test_nothing_else_is_in_the_context() -> None:
    for name in (
        "tests/conftest.py",
        ".git/HEAD",
        "docs/serve.md",
        "scripts/test.py",
        ".venv/x",
        "src/a/b.pyc",
    ):
        assert not in_context(ROOT / name)


def test_packages_are_those_of_the_setup() -> None:
    """One place pins them; pip is called by nobody else."""
    (run,) = of("build", "RUN")
    words = shlex.split(run.partition("&&")[0])
    assert words[-2:] == ["python3", "scripts/setup.py"], "without dev"
    assert "DYNAMO_VLLM_DEVICE=$DEVICE" in words and "DYNAMO_VLLM_VLLM=$VLLM" in words
    assert "UV_COMPILE_BYTECODE=1" in words
    assert not [rest for word, rest in instructions() if word == "RUN" and "pip " in rest]


def test_setup_finds_its_own_modules() -> None:
    """They are copied one by one; the context has no other script."""
    copied = " ".join(of("build", "COPY")).split()
    for module in ("setup", "setup_packages", "setup_report"):
        text = (ROOT / "scripts" / f"{module}.py").read_text()
        for needed in re.findall(r"^\s*(?:from|import) (setup_\w+)", text, flags=re.MULTILINE):
            assert f"scripts/{needed}.py" in copied, f"{module} imports {needed}"


def test_runs_as_the_user_the_manifests_name() -> None:
    assert of("image", "USER") == [f"{USER}:{USER}"]
    words = [word for word, _ in stages()["image"]]
    assert "RUN" not in words[words.index("USER") :]
    (made,) = of("image", "RUN")
    assert f"--uid {USER}" in made
    assert f"--owner {USER} --group {USER} /models /shared" in made


def test_says_what_it_is_and_how_it_is() -> None:
    (label,) = of("image", "LABEL")
    assert f'org.opencontainers.image.version="{__version__}"' in label
    assert of("image", "ENTRYPOINT") == ['["dynamo-vllm"]']
    (health,) = of("image", "HEALTHCHECK")
    assert "/opt/dynamo-vllm/deploy/docker/healthy.py" in health
    assert of("image", "COPY") == ["--from=build /opt/dynamo-vllm /opt/dynamo-vllm"]


def test_docs_build_devices_there_are() -> None:
    """In the Dockerfile itself, in the docs and in the recipes."""
    texts = [ROOT / "Dockerfile", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    built = [
        line
        for path in texts
        for line in re.findall(r"docker build [^`\n]+", path.read_text())
        if "-t" in line
    ]
    assert len(built) >= 6
    for line in built:
        words = shlex.split(line)
        given = dict(words[at + 1].split("=") for at, word in enumerate(words) if word == "--build-arg")
        assert given.keys() <= {"DEVICE", "EXTRAS", "VLLM"}, line
        assert given.get("VLLM") in (None, *setup_packages.versions()), line
        assert given["DEVICE"] in DEVICES, line
        assert "--target" not in words, line
        assert words[words.index("-t") + 1].startswith(f"dynamo-vllm:{__version__}-{given['DEVICE']}"), line


@pytest.mark.parametrize(
    ("variable", "status", "code"), [("DYN_SYSTEM_PORT", 200, 0), ("DYN_HTTP_PORT", 503, 1)]
)
@pytest.mark.parametrize("has_tls", [False, True])
def test_health_is_what_live_says(
    variable: str, status: int, code: int, has_tls: bool, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path, "models.example") if has_tls else None
    with live(status, certificate) as port:
        done = subprocess.run([sys.executable, HEALTHY], env={variable: str(port)}, timeout=30)
    assert done.returncode == code

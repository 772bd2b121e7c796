"""Recipes: what their pages and files say is what the commands take, compute and make today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from generate import examples

from deploy import manifests as read
from dynamo_vllm.cli import check, export, main, size
from dynamo_vllm.cli.running import chat, status
from dynamo_vllm.cli.start import serve
from dynamo_vllm.config import build, checks, worker_plan
from dynamo_vllm.config.options import FrontendOptions, SizeOptions, WorkerOptions
from dynamo_vllm.export import workload
from dynamo_vllm.supervise.planning import plan

ROOT = read.ROOT
RECIPES = ROOT / examples.RECIPES
PAGES = sorted(RECIPES.glob("*/README.md"))
FILES = sorted(RECIPES.glob("**/serve.yaml"))
ASKED_FOR = {"deepseek-r1", "gpt-oss", "qwen3-single-gpu", "lmcache", "prompt-embeds", "omni"}
_BASH = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
_CONSOLE = re.compile(r"^\$ dynamo-vllm (size [^\n]*)$", re.M)
_CODE = re.compile(r"`(dynamo-vllm [^`\n…]*)`")


def name(path: Path) -> str:
    return path.parent.relative_to(RECIPES).as_posix()


def test_there_is_one_for_everything_asked_for() -> None:
    assert {path.parent.name for path in PAGES} == ASKED_FOR
    assert {name(path) for path in FILES} == set(examples.EXPORTS)
    index = (RECIPES / "README.md").read_text()
    for recipe in ASKED_FOR:
        assert f"({recipe}/README.md)" in index


# --- pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", examples.pages(ROOT), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_show_what_size_answers_today(path: Path) -> None:
    assert path.read_text() == examples.filled(path.read_text(), ROOT), "run 'make docs'"


def commands(text: str) -> list[list[str]]:
    """The words of every `dynamo-vllm …` in a page's shell blocks, and of those within a line."""
    lines = [line for block in _BASH.findall(text) for line in block.splitlines()]
    found = [line for line in lines if line.startswith("dynamo-vllm ")]
    found += [f"dynamo-vllm {line}" for line in _CONSOLE.findall(text)]
    found += [line for line in _CODE.findall(text) if "/" in line or "--" in line]
    return [shlex.split(line.replace('"$MODEL"', "MODEL"))[1:] for line in found]


def understand(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command as it does before it acts."""
    monkeypatch.chdir(ROOT)
    kind, rest = argv[0], argv[1:]
    assert kind in main.COMMANDS
    unknown: list[str] = []
    if kind == "serve":
        _, wanted = serve.understand(rest, {})
        assert plan.make(wanted, {}, Path("discovery"), elsewhere=True).workers
    elif kind == "export":
        export.understand(rest, {})
    elif kind == "size":
        _, unknown = build.parse(SizeOptions, ["--model", *rest], {}, size.PROG, "")
    elif kind == "check":
        _, rest = build.parse(check.CheckOptions, rest, {}, "check", "")
        build.parse(WorkerOptions, rest, {}, "check", "")
    elif kind == "status":
        _, unknown = build.parse(status.StatusOptions, rest, {}, "status", "")
    elif kind == "chat":
        _, unknown = build.parse(chat.ChatOptions, rest, {}, "chat", "")
    else:
        pytest.fail(f"{kind}: teach this test to parse it")
    assert not unknown


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_in_pages_are_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commands(path.read_text())
    assert found
    for argv in found:
        understand(argv, monkeypatch)


def test_a_command_that_is_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (argv,) = commands("```bash\ndynamo-vllm size MODEL --colour red\n```\n")
    with pytest.raises(AssertionError):
        understand(argv, monkeypatch)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_and_links_in_pages_are_there(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"deploy/[\w./-]+", text)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for target in [*(ROOT / word for word in named), *(path.parent / link for link in links if link)]:
        assert target.exists(), target


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_objects_that_pages_name_are_made(path: Path) -> None:
    """Namespaces and services of kubectl's lines, from the files that the page applies."""
    folders = [folder for folder in examples.EXPORTS if folder.split("/")[0] == path.parent.name]
    made = [document for folder in folders for document in documents(folder)] + prepared(path.parent)
    names = {(document["kind"], document["metadata"]["name"]) for document in made if "metadata" in document}
    text = path.read_text()
    for namespace in re.findall(r"kubectl -n (\S+)", text):
        assert ("Namespace", namespace) in names
    for service in re.findall(r"port-forward service/(\S+) 8000:8000", text):
        assert ("Service", service) in names
    for job in re.findall(r"job/(\S+) --timeout", text):
        assert ("Job", job) in names


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_models_in_requests_are_served(path: Path) -> None:
    served = {
        str(served)
        for file in FILES
        if path.parent in file.parents
        for group in yaml.safe_load(file.read_text())["workers"]
        for served in group["served_model_name"]
    }
    asked = set(re.findall(r'"model": "([^"]+)"', path.read_text()))
    assert asked <= served


# --- serve files ----------------------------------------------------------------------------------------


def words(group: dict[str, Any]) -> str:
    return " ".join(map(str, group.get("args", ())))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_serve_files_parse_and_plan(path: Path) -> None:
    _, wanted = serve.understand(["--config", str(path)], {})
    assert workload.of_cluster(wanted, "kubernetes").workers
    if "four-nodes" not in path.parts:  # that is for a cluster alone
        assert plan.make(wanted, {}, Path("discovery"), elsewhere=True).workers


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_layouts_that_pages_size_are_those_of_the_files(path: Path) -> None:
    """The first sized layout of a page, and every one of DeepSeek's workers, stands in a serve file."""
    sized = [
        line.removeprefix("flags").strip()
        for line in path.read_text().splitlines()
        if line.startswith("flags     ")
    ]
    groups = [
        words(group).replace("--data-parallel-size-local 4 ", "")
        for file in FILES
        if path.parent in file.parents
        for group in yaml.safe_load(file.read_text())["workers"]
    ]
    if path.parent.name == "omni":
        assert groups == [""]  # only a part of the pipeline can be sized
    else:
        assert set(groups) <= set(sized)


# --- manifests ------------------------------------------------------------------------------------------


def documents(folder: str) -> list[dict[str, Any]]:
    files = (RECIPES / folder / "k8s").glob("*.yaml")
    return read.documents({path.name: path.read_text() for path in files})


def prepared(recipe: Path) -> list[dict[str, Any]]:
    return read.documents({"prepare.yaml": (recipe / "prepare.yaml").read_text()})


@pytest.mark.parametrize("folder", examples.EXPORTS)
def test_manifests_are_what_export_makes(folder: str) -> None:
    assert examples.old(folder) == [], "run 'make docs'"


@pytest.mark.parametrize("folder", examples.EXPORTS)
def test_commands_in_manifests_are_understood(folder: str) -> None:
    for container in read.containers(documents(folder)):
        env = read.environment(container, NODE_RANK="0")
        kind, *argv = read.arguments(container, env)
        if kind == "frontend":
            front, rest = build.parse(FrontendOptions, argv, env, "prog", "")
            assert not rest
            checks.check_frontend(front)
        else:
            worker = worker_plan.parse(argv, env)
            checks.check_worker(worker, elsewhere=True)


@pytest.mark.parametrize("folder", examples.EXPORTS)
def test_kubernetes_takes_them(folder: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, or make venv-dev")
    for document in documents(folder):
        read.validate(document)


@pytest.mark.parametrize("recipe", sorted(ASKED_FOR))
def test_kubernetes_takes_what_is_prepared(recipe: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, or make venv-dev")
    for document in prepared(RECIPES / recipe):
        read.validate(document)


@pytest.mark.parametrize("recipe", sorted(ASKED_FOR))
def test_the_job_fetches_what_is_served_to_where_workers_look(recipe: str) -> None:
    found = prepared(RECIPES / recipe)
    (job,) = [document for document in found if document["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    folders = [folder for folder in examples.EXPORTS if folder.split("/")[0] == recipe]
    models = {yaml.safe_load((RECIPES / folder / "serve.yaml").read_text())["model"] for folder in folders}
    assert container["command"][:2] == ["hf", "download"]
    assert container["command"][2] in models
    (claim,) = [document for document in found if document["kind"] == "PersistentVolumeClaim"]
    for folder in folders:
        made = documents(folder)
        homes = {read.environment(item)["HF_HOME"] for item in read.containers(made)}
        assert homes == {read.environment(container)["HF_HOME"]}
        assert claim["metadata"]["name"] in str(made)
        assert {document["metadata"].get("namespace") for document in made if "spec" in document} <= {
            job["metadata"]["namespace"],
            None,  # what a cluster has once
        }

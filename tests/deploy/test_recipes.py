"""Recipes: what their pages and files say is what the commands take, compute and make today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from generate import examples

from deploy import manifests as read

ROOT = read.ROOT
RECIPES = ROOT / examples.RECIPES
PAGES = sorted(RECIPES.glob("*/README.md"))
FILES = sorted(RECIPES.glob("**/serve.yaml"))
ASKED_FOR = {"deepseek-r1", "gpt-oss", "qwen3-single-gpu", "lmcache", "prompt-embeds", "omni"}


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

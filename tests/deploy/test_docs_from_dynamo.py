"""The map for users of upstream's vLLM backend says what our parser, verbs, routes and metrics do.

"same" in the last column means: the same flag and the same variable set the same option here. "same as …"
means that both command lines give one plan. Where it begins with "not offered" or "not needed", we must not
know the name.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from docs_site import pages
from generate import docs

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.cli.main import COMMANDS
from dynamo_vllm.config import build, worker_plan
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.options.worker import OLDER_ROLES
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.serving.admin.endpoint import handled
from dynamo_vllm.serving.system_port.routes import ROUTES, NoRoute, route
from harness import upstream_map
from harness.upstream_map import Row

FLAGS = upstream_map.rows("Flags of a worker")
VARIABLES = upstream_map.rows("Variables without a flag")
ENDPOINTS = upstream_map.rows("Endpoints")
METRICS = upstream_map.rows("Metrics")
ALL = [*upstream_map.rows("Launch scripts"), *FLAGS, *VARIABLES, *ENDPOINTS, *METRICS]
OPTIONS = build.declared(WorkerOptions)
BY_FLAG = {flag: item for item in OPTIONS for flag in item.flags}
BY_VARIABLE = {name: item for item in OPTIONS for name in (item.option.env, *item.option.older_envs)}
OF_OTHERS = {"MODEL_EXPRESS_URL", "DYN_RESPONSE_PLANE"}
"""Variables that the runtime or a package reads; no option has them."""
OF_VLLM = {"--kv-transfer-config", "--speculative-config", "--gpu-memory-utilization", "--max-num-seqs"}
A_VALUE = {bool: "1", int: "7", float: "7", str: "word"}
ELSEWHERE = {"--lora-path", "DYN_OMNI_…", "DYN_BENCH_…"}
"""Ours has this name for something else, and the row says so; or a family of names."""


def is_same(row: Row) -> bool:
    return re.match(r"same\b", row.here) is not None


def is_absent(row: Row) -> bool:
    return row.here.startswith(("not offered", "not needed"))


def replaced_by(row: Row) -> list[str] | None:
    found = re.match(r"same as `([^`]+)`", row.here)
    return found[1].split() if found else None


SAME = [row for row in FLAGS if is_same(row)]
OLDER = [row for row in FLAGS if replaced_by(row)]


def test_the_page_has_its_tables() -> None:
    assert [bool(rows) for rows in (FLAGS, VARIABLES, ENDPOINTS, METRICS)] == [True] * 4
    assert len(SAME) > 20 and len(OLDER) >= 7
    named = [name for row in FLAGS + VARIABLES + ENDPOINTS + METRICS for name in row.upstream]
    assert len(named) == len(set(named)), "a name stands twice"
    for row in FLAGS + VARIABLES + ENDPOINTS + METRICS:
        assert is_same(row) or is_absent(row) or row.named_here, f"{row}: says nothing"


def test_same_flag_and_variable_set_the_same_option() -> None:
    for row in SAME:
        by_flag = {BY_FLAG[flag].name for flag in row.upstream}
        by_variable = {BY_VARIABLE[name].name for name in row.variables}
        assert by_flag == by_variable, row
        for flag in row.upstream:
            item = BY_FLAG[flag]
            value = item.option.choices[-1] if item.option.choices else A_VALUE[item.kind]
            argv = [flag] if item.kind is bool else [flag, value]
            given, rest = build.parse(WorkerOptions, argv, {}, "worker", "")
            assert rest == [] and getattr(given, item.name) != item.default or item.default is True
            for name in row.variables:
                if BY_VARIABLE[name] is item:
                    assert build.parse(WorkerOptions, [], {name: value}, "worker", "")[0] == given


def resolved(argv: list[str], env: dict[str, str]) -> WorkerPlan:
    """The plan of a worker, without the words that named its role."""
    plan = worker_plan.parse(["--enable-multimodal", "--ec-storage-path", "/e", *argv], env)
    options = plan.options
    assert options.asks_encoders is (options.route_to_encoder or options.multimodal_worker)
    plain: dict[str, Any] = dict.fromkeys((*OLDER_ROLES, "multimodal_worker", "route_to_encoder"), False)
    plain |= {"disaggregation_mode": options.role, "ec_consumer_mode": options.asks_encoders}
    return plan.with_options(dataclasses.replace(options, **plain))


def test_older_flag_and_variable_make_the_plan_of_the_newer_flag() -> None:
    for row in OLDER:
        newer = replaced_by(row)
        assert newer is not None
        (flag,), (variable,) = row.upstream, row.variables
        assert resolved([flag], {}) == resolved([], {variable: "1"}) == resolved(newer, {})
        assert resolved(newer, {}) != resolved([], {})


def test_flag_with_another_or_no_name_is_unknown_here() -> None:
    for row in (row for row in FLAGS if not is_same(row)):
        assert [name for name in row.upstream if name in BY_FLAG and name not in ELSEWHERE] == []
        assert [name for name in row.variables if name in BY_VARIABLE] == [], row


def test_variable_without_a_flag_is_what_the_row_says() -> None:
    for row in VARIABLES:
        for name in row.upstream:
            assert (name in BY_VARIABLE) is is_same(row), name


def test_what_the_row_names_of_ours_exists() -> None:
    every = [item for _, cls, _ in docs.SECTIONS for item in build.declared(cls)]
    flags = {flag for item in every for flag in item.flags} | OF_VLLM
    flags |= {flag.replace("--", "--no-", 1) for flag in flags}
    variables = {name for item in every for name in (item.option.env, *item.option.older_envs)} | OF_OTHERS
    for row in ALL:
        named = " ".join(row.named_here)
        assert set(re.findall(r"(?<!\S)--[a-z-]+", named)) - flags - vllm_words(row) == set(), row
        assert set(re.findall(r"(?<!\S)DYN_\w+", named)) - variables == set(), row
        for command in re.findall(r"dynamo-vllm ([a-z]+)", named):
            assert command in COMMANDS, command


def vllm_words(row: Row) -> set[str]:
    """Flags of a whole command: those that are not ours go to vLLM, and another test parses the command."""
    commands = [piece for piece in row.named_here if piece.startswith("dynamo-vllm ")]
    return {word for piece in commands for word in piece.split() if word.startswith("--")}


def test_endpoint_is_what_the_row_says() -> None:
    served = {where.rpartition(".")[2] for where in handled("dynamo.backend.generate")} | {"generate"}
    for row in ENDPOINTS:
        for name in row.upstream:
            if name.startswith(("GET ", "POST ", "DELETE ")):
                method, path = name.split(" ", 1)
                assert has_route(method, path) is is_same(row), name
            else:
                assert (name in served) is is_same(row), name
        for path in (name for name in row.named_here if name.startswith("/engine/")):
            assert has_route("POST", path), path


def has_route(method: str, path: str) -> bool:
    try:
        return method in {way.method for way in ROUTES} and route(method, path)[0] in VERBS
    except NoRoute:
        return method == "GET" and path in ("/health", "/live", "/metrics")


def test_metric_of_ours_is_in_the_code() -> None:
    source = (pages.ROOT / "src/dynamo_vllm/serving/metrics/series.py").read_text()
    for row in METRICS:
        for name in row.named_here:
            assert f'"{name.removeprefix("dynamo_component_")}"' in source, name
        of_the_runtime = "runtime's" in row.here or "*" in row.upstream[0]
        for name in row.upstream:
            is_ours = f'"{name.removeprefix("dynamo_component_")}"' in source
            assert is_ours is (is_same(row) and not of_the_runtime), name


def test_launch_scripts_are_named_once() -> None:
    named = [name for row in upstream_map.rows("Launch scripts") for name in row.upstream]
    assert len(named) == len(set(named)) > 40
    assert all(Path(name).suffix == ".sh" for name in named)

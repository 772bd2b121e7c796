"""What deploy/observability ships: the checker of Prometheus passes it, and the parts know each other."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_vllm.supervise.prometheus_targets import JOBS, WORKER
from harness.prometheus import promtool, selected
from harness.waiting import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
RULES = FOLDER / "prometheus" / "rules.yaml"
RULE_TESTS = FOLDER / "prometheus" / "rules.test.yaml"
SILENT = "silent where all is well"


@functools.cache
def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def rules() -> Iterator[dict[str, Any]]:
    for group in read(RULES)["groups"]:
        yield from group["rules"]


ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]


def test_rules_pass_the_checker() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def test_every_alert_fires_on_bad_series_and_is_silent_on_good_ones() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(RULE_TESTS))


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_a_case_a_severity_and_a_line_in_the_docs(alert: str) -> None:
    (rule,) = [rule for rule in rules() if rule.get("alert") == alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "runbook"} <= set(rule["annotations"])
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    text = (ROOT / page).read_text()
    assert f"## {anchor.capitalize()}\n" in text and f"| `{alert}` |" in text
    tests = read(RULE_TESTS)["tests"]
    fires = [
        sample["labels"]
        for test in tests
        for case in test["promql_expr_test"]
        for sample in case["exp_samples"]
    ]
    assert any(f'alertname="{alert}"' in labels for labels in fires), "no bad series"
    (silent,) = [test for test in tests if test["name"] == SILENT]
    shown = " ".join(series["series"] for series in silent["input_series"])
    assert set(metrics_of(alert)) <= {name_and_labels.split("{")[0] for name_and_labels in shown.split()}


def metrics_of(alert: str) -> list[str]:
    """The series an alert reads, through recording rules too."""
    by_name = {rule.get("alert", rule.get("record")): rule["expr"] for rule in rules()}
    found: list[str] = []
    left = [alert]
    while left:
        for part in selected(by_name[left.pop()]):
            (left if part.name in by_name else found).append(part.name)
    return found


def test_configuration_for_serve_passes_the_checker(tmp_path: Path) -> None:
    (tmp_path / "prometheus").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("prometheus.yaml", "rules.yaml"):
        (tmp_path / "prometheus" / name).write_text((FOLDER / "prometheus" / name).read_text())
    (tmp_path / "run" / "prometheus.json").write_text("[]")
    said = promtool("check", "config", str(tmp_path / "prometheus" / "prometheus.yaml"))
    assert "WARNING" not in said and "SUCCESS" in said


def test_pods_become_frontends_and_workers(tmp_path: Path) -> None:
    """Debian's build has no Kubernetes in it, so what a cluster would say comes from a file."""
    config = yaml.safe_load((FOLDER / "prometheus" / "kubernetes.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    scrape["file_sd_configs"] = [{"files": [str(tmp_path / "pods.json")]}]
    del config["rule_files"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    ports = {"http": "10.0.0.1:8000", "system": "10.0.0.2:9090", "other": "10.0.0.3:1"}
    pods = [pod(address, port) for port, address in ports.items()]
    pods += [pod("10.0.0.4:9090", "system", phase="Failed"), pod("10.0.0.5:9090", "system", app="x")]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    words = ("check", "service-discovery", "--timeout=3s", str(tmp_path / "config.yaml"), "dynamo-vllm")
    found = until("targets", lambda: json.loads(promtool(*words)))
    kept = {one["labels"]["instance"]: one["labels"] for one in found if one["labels"]}
    jobs = {address: labels["job"] for address, labels in kept.items()}
    assert jobs == {ports["http"]: JOBS["frontend"], ports["system"]: WORKER}
    assert kept[ports["system"]] | {"process": "pod-system", "namespace": "ns"} == kept[ports["system"]]


def pod(address: str, port: str, phase: str = "Running", app: str = "dynamo-vllm") -> dict[str, Any]:
    said = {
        "pod_label_app_kubernetes_io_name": app,
        "pod_container_port_name": port,
        "pod_phase": phase,
        "pod_name": f"pod-{port}",
        "namespace": "ns",
        "pod_node_name": "node",
    }
    return {
        "targets": [address],
        "labels": {f"__meta_kubernetes_{name}": value for name, value in said.items()},
    }


def test_dashboard_is_what_its_script_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dashboard.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_compose_mounts_what_is_there() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./") and source != "./run":  # which serve makes
                assert (FOLDER / source).exists(), source
    board = services["grafana"]["volumes"][1].split(":")[1]
    provider = yaml.safe_load(
        (FOLDER / "grafana" / "provisioning" / "dashboards" / "dynamo-vllm.yaml").read_text()
    )
    assert Path(board).parent == Path(provider["providers"][0]["options"]["path"])

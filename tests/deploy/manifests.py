"""What is below deploy/k8s and deploy/compose, read as a cluster would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).parent / "schemas"
Document = dict[str, Any]
_valid: set[str] = set()
"""What was compared with the schema already, which takes long."""


def documents(texts: Mapping[str, str]) -> list[Document]:
    return [document for text in texts.values() for document in yaml.safe_load_all(text)]


def validate(document: Document) -> None:
    """Against Kubernetes' own schema, or ours for kinds that others brought."""
    ours = SCHEMAS / f"{document['kind']}.yaml"
    if ours.is_file():
        jsonschema.validate(document, yaml.safe_load(ours.read_text()))
    else:
        against_kubernetes(document)
    for template in templates(document):
        against_kubernetes(pod(template))


def against_kubernetes(document: Document) -> None:
    import kubernetes_validate

    text = json.dumps(document, sort_keys=True, default=str)
    if text not in _valid:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        _valid.add(text)


def pod(template: Document) -> Document:
    metadata = {"name": "pod", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def templates(document: Document) -> Iterator[Document]:
    spec = document.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    for component in spec.get("components", ()):
        yield component["podTemplate"]


def containers(found: list[Document]) -> Iterator[Document]:
    for document in found:
        for template in templates(document):
            yield from template["spec"].get("initContainers", ())
            yield from template["spec"]["containers"]


def environment(container: Document, **fields: str) -> dict[str, str]:
    """As the process sees it; what only a running pod has comes from `fields`."""
    found = {}
    for item in container["env"]:
        if "value" in item:
            found[item["name"]] = item["value"]
        elif "fieldRef" in item["valueFrom"]:
            found[item["name"]] = fields.get(item["name"], "x")
    return found


def arguments(container: Document, env: Mapping[str, str]) -> list[str]:
    """As Kubernetes hands them over: $(NAME) replaced, $$ made one."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value, word) for word in container["args"]]

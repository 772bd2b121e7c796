"""Runs `dynamo-vllm export k8s|compose`: converts a `serve` file into manifests or a compose file."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.cli.start.serve import from_file
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import ExportOptions
from dynamo_vllm.config.options.export import KINDS
from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.export import compose, k8s, k8s_gateway, operator, workload, yaml_files
from dynamo_vllm.export.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.topology import Topology

PROG = "dynamo-vllm export"
DESCRIPTION = """\
Convert the file of 'dynamo-vllm serve --config' into Kubernetes manifests or a docker compose file.

  dynamo-vllm export k8s --config serve.yaml -o manifests       plain Kubernetes objects
  dynamo-vllm export k8s --operator --config serve.yaml -o manifests
                                                                one DynamoGraphDeployment
  dynamo-vllm export compose --config serve.yaml -o containers  with etcd and NATS

The processes get the flags serve would start them with; nothing is sent anywhere."""

OF_GATEWAY = ("gateways", "gateway_tls_secret", "gateway_api", "hostname", "gateway_gb", "gateway_class")
FOR_KUBERNETES = (
    *("operator", "kube_namespace", "discovery", "frontends", "worker_cpus", "worker_memory_gb"),
    *("cache_gb", "cache_class", "cache_claim", "hf_secret", "etcd", "nats"),
    *OF_GATEWAY,
)


def main(argv: Sequence[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        made = build.parser(ExportOptions, PROG, DESCRIPTION)
        made.usage = f"{PROG} {'|'.join(KINDS)} --config FILE -o FOLDER [options]"
        print(made.format_help(), end="")
        return 0 if argv else 2
    kind, options = understand(argv, build.environment())
    texts, notes = export(kind, options, shown(argv), Path())
    folder = Path(str(options.output))
    left = yaml_files.write(folder, texts, force=options.force, beside=Path(str(options.config)))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for name in left:
        print(f"note: {folder / name} is from an earlier export and no longer used", file=sys.stderr)
    print(f"wrote {', '.join(texts)} to {folder}")
    print(f"next: {next_step(kind, options, folder)}")
    return 0


def understand(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ExportOptions]:
    kind, rest = argv[0], argv[1:]
    if kind not in KINDS:
        raise ConfigError(
            f"{kind!r} is not a kind of export; use {' or '.join(KINDS)}: {PROG} k8s --config …"
        )
    options, unknown = build.parse(ExportOptions, rest, environment, PROG, DESCRIPTION)
    if unknown:
        raise ConfigError(
            f"{unknown[0]} is not an option of export; flags of workers and of vLLM belong in the file"
        )
    checks.check_export(options)
    if kind == "compose":
        refuse_kubernetes_options(options)
    return kind, options


def refuse_kubernetes_options(options: ExportOptions) -> None:
    """Raise for an option that has no meaning in a compose file."""
    for item in build.declared(ExportOptions):
        if item.name in FOR_KUBERNETES and getattr(options, item.name) != item.default:
            raise ConfigError(f"{item.flags[0]} is for 'export k8s'; leave it out")


def shown(argv: Sequence[str]) -> str:
    """Return the command for the first line of the files, without --force."""
    return shlex.join(word for word in argv if word != "--force")


def export(kind: str, options: ExportOptions, command: str, root: Path) -> tuple[dict[str, str], list[str]]:
    """Return texts by file name, and notes on what was left out; the `serve` file's path starts at `root`."""
    wanted = from_file(str(root / str(options.config)))
    if options.model:
        wanted = dataclasses.replace(wanted, model=options.model)
    wanted = with_gateway(wanted, options)
    settings = Settings(options)
    if kind == "compose":
        found = workload.of_machine(wanted, settings.on_gpu)
        settings = Settings(options, found.request_plane)
        text = yaml_files.yaml_text([compose.document(found, settings)], command)
        return {compose.FILE: text}, [*found.notes, *compose.notes(found)]
    refuse_missing_nats(wanted, options)
    found = workload.of_cluster(wanted, settings.discovery, settings.secret)
    settings = Settings(options, found.request_plane, found.event_plane)
    made = operator.files(found, settings) if options.operator else k8s.files(found, settings)
    texts = {name: yaml_files.yaml_text(documents, command) for name, documents in made.items()}
    more = [] if found.gateway is None else k8s_gateway.notes(found.gateway, settings)
    return texts, [*found.notes, *more]


def with_gateway(wanted: Topology, options: ExportOptions) -> Topology:
    """Return the topology with a gateway if it is wanted. The host of a frontend is that of a pod: it says
    nothing about who can reach it.
    """
    if options.gateway is False:
        wanted = dataclasses.replace(wanted, gateway=None)
    elif options.gateway:
        wanted = dataclasses.replace(wanted, gateway=wanted.gateway or {})
    if wanted.gateway is None:
        for item in build.declared(ExportOptions):
            if item.name in OF_GATEWAY and getattr(options, item.name) != item.default:
                raise ConfigError(
                    f"{item.flags[0]} needs a gateway; add --gateway, or a section gateway to the file"
                )
    return wanted


def refuse_missing_nats(wanted: Topology, options: ExportOptions) -> None:
    for values in (wanted.frontend, *(group.options for group in wanted.workers)):
        for plane in ("request_plane", "event_plane"):
            if values.get(plane) == "nats" and not options.nats:
                raise ConfigError(f"{flag(plane)} nats needs a server; add --nats nats://HOST:4222")


def next_step(kind: str, options: ExportOptions, folder: Path) -> str:
    if kind == "compose":
        return f"docker compose -f {folder / compose.FILE} up"
    apply = f"kubectl apply -k {folder}"
    if options.operator or options.discovery == "etcd":
        return apply
    return f"kubectl apply -f {folder / k8s.CRD_FILE} (once per cluster), then {apply}"

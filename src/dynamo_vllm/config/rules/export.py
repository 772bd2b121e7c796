"""Rules for the options of `export`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dynamo_vllm.config import planes
from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import ExportOptions

MAX_NAME = 36
"""Kubernetes takes 63 characters, and parts of the name follow."""
MAX_HOSTNAME = 253
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_HOSTNAME = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def file_and_folder_are_given(o: ExportOptions) -> None:
    if not o.config:
        raise ConfigError("--config FILE is missing: the file for 'dynamo-vllm serve --config'")
    if not o.output:
        raise ConfigError("-o FOLDER is missing: the folder to write to")


def names_are_valid(o: ExportOptions) -> None:
    names = ("name", "kube_namespace", "cache_claim", "hf_secret", "cache_class")
    in_gateway = ("gateway_tls_secret", "gateway_class")
    parent = [] if o.gateway_api is None else o.gateway_api.split("/", 1)
    given = [*bounds.values(o, (*names, *in_gateway)), *(("--gateway-api", part) for part in parent)]
    for option, value in given:
        if not _LABEL.fullmatch(value) or len(value) > MAX_NAME:
            raise ConfigError(
                f"{option} {value!r} is not a valid Kubernetes name; use at most {MAX_NAME} lower-case "
                "letters, digits and dashes, starting with a letter"
            )


def numbers_are_above_zero(o: ExportOptions) -> None:
    bounds.above_zero(o, "frontends", "start_seconds", "worker_cpus", "worker_memory_gb")
    bounds.above_zero(o, "shm_gb", "cache_gb", "gateways", "gateway_gb")


def shared_memory_fits(o: ExportOptions) -> None:
    if o.worker_memory_gb is not None and o.worker_memory_gb <= o.shm_gb:
        raise ConfigError(
            f"--worker-memory-gb {o.worker_memory_gb} must be larger than --shm-gb {o.shm_gb}, which "
            "counts as memory; use more memory, or less shared memory"
        )


def etcd_has_addresses(o: ExportOptions) -> None:
    if o.discovery == "etcd" and not o.etcd:
        raise ConfigError("--discovery etcd needs the addresses of etcd; add --etcd http://HOST:2379")
    if o.discovery != "etcd" and o.etcd:
        raise ConfigError(f"--etcd {o.etcd} needs --discovery etcd; add that, or leave --etcd out")


def servers_have_addresses(o: ExportOptions) -> None:
    """As the pods will refuse them."""
    if o.etcd:
        planes.check_addresses("--etcd", o.etcd, ("http", "https"))
    if o.nats:
        planes.check_addresses("--nats", o.nats, ("nats", "tls"))


def operator_chooses_discovery(o: ExportOptions) -> None:
    if o.operator and o.discovery == "etcd":
        raise ConfigError("--operator chooses the discovery itself; leave --discovery out")


def one_place_ends_tls(o: ExportOptions) -> None:
    if o.gateway_api and o.gateway_tls_secret:
        raise ConfigError(
            f"--gateway-api {o.gateway_api} ends TLS itself; leave --gateway-tls-secret out, and name the "
            "Secret in that Gateway"
        )


def hostname_is_of_a_route(o: ExportOptions) -> None:
    if o.hostname is None:
        return
    if not o.gateway_api:
        raise ConfigError(f"--hostname {o.hostname} needs --gateway-api, the Gateway that has it")
    if not _HOSTNAME.fullmatch(o.hostname) or len(o.hostname) > MAX_HOSTNAME:
        raise ConfigError(
            f"--hostname {o.hostname!r} is not a hostname; use lower-case letters, digits and dots"
        )


RULES = (
    file_and_folder_are_given,
    names_are_valid,
    numbers_are_above_zero,
    shared_memory_fits,
    etcd_has_addresses,
    servers_have_addresses,
    operator_chooses_discovery,
    one_place_ends_tls,
    hostname_is_of_a_route,
)

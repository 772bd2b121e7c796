"""Converts the gateway of a topology into the arguments of its two containers, without local settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import build, checks, topology
from dynamo_vllm.config.options import FrontendOptions, GatewayOptions, GatewaySettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.topology import Values

CONTROL, ENVOY = "control", "envoy"
MODELS = "/models"
SOCKETS = "/gateway"
"""Where both containers mount the folder of their sockets."""
DATA = "/data"
"""Where the control app keeps files of clients, and SQLite."""
USAGE = "/usage"
"""Where workers on one machine keep counts that no gateway has taken yet."""
STATUS_PORTS = {CONTROL: 9091, ENVOY: 9092}
EVERYWHERE = "0.0.0.0"
KEY, DATABASE = "VLLM_API_KEY", "DYN_VLLM_GATEWAY_DATABASE"
SQLITE = f"sqlite:///{DATA}/gateway.db"
_LOCAL = ("data_dir", "envoy_path")
_OF_FRONTEND = ("max_body_mb", "drain_seconds", "namespace")
"""Options of the file's frontend that the gateway has too."""
_TLS = ("tls_cert_path", "tls_key_path")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A control app and an Envoy, which share a folder."""

    options: Mapping[str, Any]
    """What the file says, without secrets, addresses and places."""
    tls: Mapping[str, str]
    """The files of a certificate on the model volume."""
    port: int
    """The port of clients; the frontend has the same one in its own container."""
    drain_seconds: float
    secrets: tuple[str, ...] = ()
    """Variables whose values are secret."""

    @property
    def is_shared(self) -> bool:
        """Return whether several gateways can work on its database."""
        return DATABASE in self.secrets

    def args(self, part: str, frontend: str, more: Values) -> tuple[str, ...]:
        """Return the arguments of a part's command; `frontend` is the host behind the gateway."""
        given: dict[str, Any] = {
            **self.options,
            **more,
            "host": EVERYWHERE,
            "port": self.port,
            "frontend": (f"http://{frontend}:{self.port}",),
            "part": part,
            "gateway_dir": SOCKETS,
            "system_host": EVERYWHERE,
            "status_port": STATUS_PORTS[part],
        }
        if part == CONTROL:
            given["data_dir"] = f"{DATA}/files"
        return ("gateway", *topology.to_argv(GatewayOptions, given))


def of(values: Values, frontend: Values) -> tuple[Gateway, list[str]]:
    """Return the gateway of a file, and notes on what was left out.

    `frontend` are the options of the section frontend. Its files are on the model volume: other paths were
    refused.
    """
    kept = {name: value for name, value in values.items() if name not in _LOCAL}
    notes = [
        f"gateway: {name} {values[name]} is left out: containers have their own"
        for name in _LOCAL
        if name in values
    ]
    if str(kept.get("database", "")).startswith("sqlite:"):
        notes.append(f"gateway: database {kept.pop('database')} is left out: the file is {DATA}/gateway.db")
    secrets = topology.secrets(GatewaySettings, kept)
    shared = {name: frontend[name] for name in (*_OF_FRONTEND, *_TLS, "port") if name in frontend}
    front = build.from_values(FrontendOptions, shared, {})
    options = build.from_values(GatewayOptions, {**kept, **shared, "port": front.port}, {})
    checks.check_gateway(options, elsewhere=True)
    named = [name for name in (*kept, *shared) if name not in (*_secret_names(), *_TLS, "port")]
    made = Gateway(
        options={name: getattr(options, name) for name in named},
        tls={name: str(shared[name]) for name in _TLS if name in shared},
        port=front.port,
        drain_seconds=front.drain_seconds,
        secrets=tuple(secrets),
    )
    return made, notes


def _secret_names() -> set[str]:
    return {item.name for item in build.declared(GatewaySettings) if item.option.secret}

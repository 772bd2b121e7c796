"""Options of `keys`: API keys and tenants in the gateway's database."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

PRIORITY_CLASSES = ("high", "normal", "low", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseOptions:
    """Which database to use; no gateway has to run."""

    database: str | None = opt(
        None,
        "database",
        "Database of the gateway: sqlite:///FILE or postgresql://USER@HOST/NAME (default: gateway.db in this "
        "user's data folder, ~/.local/share/dynamo-vllm).",
        env="DYN_VLLM_GATEWAY_DATABASE",
        metavar="URL",
        secret=True,
    )
    json: bool = opt(False, "output", "Print JSON for other programs.", env="DYN_VLLM_KEYS_JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions(DatabaseOptions):
    """What a key or tenant may use."""

    requests_per_minute: int | None = opt(
        None, "limits", "Requests per minute.", env="DYN_VLLM_KEYS_REQUESTS_PER_MINUTE", metavar="N"
    )
    tokens_per_minute: int | None = opt(
        None,
        "limits",
        "Tokens per minute, of prompts and answers.",
        env="DYN_VLLM_KEYS_TOKENS_PER_MINUTE",
        metavar="N",
    )
    tokens_per_day: int | None = opt(
        None,
        "limits",
        "Tokens per day; it begins at 0:00 UTC.",
        env="DYN_VLLM_KEYS_TOKENS_PER_DAY",
        metavar="N",
    )
    concurrent: int | None = opt(
        None, "limits", "Requests at the same time.", env="DYN_VLLM_KEYS_CONCURRENT", metavar="N"
    )
    priority_class: str | None = opt(
        None,
        "limits",
        "Whose requests come first (default: for a key that of its tenant, for a tenant normal).",
        env="DYN_VLLM_KEYS_PRIORITY_CLASS",
        choices=PRIORITY_CLASSES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateKeyOptions(LimitOptions):
    """What a new key is for."""

    tenant: str = opt(
        "default", "key", "Tenant that the key belongs to.", env="DYN_VLLM_KEYS_TENANT", metavar="NAME"
    )
    expires: str | None = opt(
        None,
        "key",
        "Time until the key ends: 30d, 12h (default: it does not).",
        env="DYN_VLLM_KEYS_EXPIRES",
        metavar="TIME",
    )
    model: tuple[str, ...] = opt(
        (),
        "key",
        "Model or adapter that the key may use; may be given several times (default: all).",
        env="DYN_VLLM_KEYS_MODEL",
        metavar="NAME",
        repeats=True,
    )
    endpoint: tuple[str, ...] = opt(
        (),
        "key",
        "Endpoint that the key may call: chat, completions, responses, embeddings, rerank, score, "
        "transcriptions …, or the beginning of a path; may be given several times (default: all).",
        env="DYN_VLLM_KEYS_ENDPOINT",
        metavar="NAME",
        repeats=True,
    )
    admin: bool = opt(False, "key", "Allow the admin endpoints too.", env="DYN_VLLM_KEYS_ADMIN")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKeysOptions(DatabaseOptions):
    """Which keys to show."""

    tenant: str | None = opt(
        None, "key", "Only keys of this tenant.", env="DYN_VLLM_KEYS_TENANT", metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateKeyOptions(DatabaseOptions):
    """What happens to the old secret."""

    grace: str | None = opt(
        None,
        "key",
        "Time for which the old secret stays valid: 1h, 7d (default: it ends at once).",
        env="DYN_VLLM_KEYS_GRACE",
        metavar="TIME",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptions(LimitOptions):
    """What the keys of a tenant share. Only what is given changes; 0 removes a limit."""

    shares_cache: bool | None = opt(
        None,
        "tenant",
        "Share the prefix cache with other tenants that share it: faster, but times tell what others asked.",
        env="DYN_VLLM_KEYS_SHARES_CACHE",
    )

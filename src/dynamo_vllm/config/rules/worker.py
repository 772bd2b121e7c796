"""Rules for the other options of a worker, and for what this version does not support."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import addresses
from dynamo_vllm.config.rules import bounds, flags
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags

ENDPOINT_TYPES = ("chat", "completions")


def known_endpoint_types(o: WorkerOptions, _: EngineFlags) -> None:
    for name in o.endpoint_types:
        if name not in ENDPOINT_TYPES:
            raise ConfigError(
                f"--endpoint-types {name!r} is unknown; choose from {', '.join(ENDPOINT_TYPES)}"
            )
    if not o.endpoint_types:
        raise ConfigError("--endpoint-types is empty; give chat, completions or both")


def template_exists(o: WorkerOptions, _: EngineFlags) -> None:
    if o.custom_jinja_template and not Path(o.custom_jinja_template).is_file():
        raise ConfigError(f"--custom-jinja-template {o.custom_jinja_template}: there is no such file")


def address_has_three_parts(o: WorkerOptions, _: EngineFlags) -> None:
    for flag, address in (("--endpoint", o.address), ("--encoder-component", o.encoders_address)):
        parts = address.split(".")
        if len(parts) != 3 or not all(parts):
            raise ConfigError(
                f"{address!r} is not an address; write {flag} dyn://namespace.component.endpoint"
            )


def budgets_are_positive(o: WorkerOptions, _: EngineFlags) -> None:
    bounds.above_zero(o, "health_seconds", "canary_seconds", "canary_timeout_seconds", "step_seconds")
    bounds.above_zero(o, "unread_mb", "guide_seconds", "guide_memory_mb", "max_items")
    bounds.above_zero(o, "max_speech_seconds")
    bounds.at_least(o, 0, "drain_seconds", "messages_per_second")


def card_port_needs_a_system_port(o: WorkerOptions, _: EngineFlags) -> None:
    if o.card_port is None:
        return
    if o.system_port is None:
        raise ConfigError("--card-port needs --system-port; add it, or leave --card-port out")
    if not 0 < o.card_port <= 32767 or o.card_port == o.system_port:
        raise ConfigError(
            f"--card-port {o.card_port} must be a port from 1 to 32767 that differs from --system-port"
        )


def engines_are_a_count(o: WorkerOptions, _: EngineFlags) -> None:
    if o.engines_here is not None and o.engines_here < 1:
        raise ConfigError(f"--engines-here {o.engines_here} must be 1 or more, or left out")


def worker_traces_have_an_address(o: WorkerOptions, _: EngineFlags) -> None:
    flags.traces_have_an_address(o.otlp_endpoint)


def worker_threads_are_a_count(o: WorkerOptions, _: EngineFlags) -> None:
    flags.threads_are_a_count(o.runtime_threads)


def worker_migration_is_a_count(o: WorkerOptions, _: EngineFlags) -> None:
    bounds.at_least(o, 0, "migration_limit")


def fake_settings_need_the_fake_engine(o: WorkerOptions, _: EngineFlags) -> None:
    if o.fake_engine is not None and o.engine != "fake":
        raise ConfigError("--fake-engine describes the fake engine; add --engine fake or leave it out")
    if o.fake_engine is not None:
        flags.json_object("--fake-engine", o.fake_engine)


def fake_engine_takes_no_engine_flags(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.engine == "fake" and engine:
        raise ConfigError(
            f"{flags.flag(next(iter(engine)))} is a flag of vLLM; leave it out, the fake engine has none "
            "of them"
        )


def embeds_need_vllm_in_token_mode(o: WorkerOptions, _: EngineFlags) -> None:
    if not o.enable_prompt_embeds:
        return
    if o.engine == "fake":
        raise ConfigError(
            "--enable-prompt-embeds needs vLLM; the fake engine takes tokens only; leave one of them out"
        )
    if o.use_vllm_tokenizer:
        raise ConfigError(
            "--enable-prompt-embeds cannot be combined with --use-vllm-tokenizer; leave one of them out"
        )


def text_is_parsed_by_vllm(o: WorkerOptions, _: EngineFlags) -> None:
    """The frontend parses tokens; text bypasses its parsers."""
    named = bounds.given(o, ("tool_call_parser", "reasoning_parser"))
    other = "--omni" if o.omni else "--engine fake" if o.engine == "fake" else None
    if o.use_vllm_tokenizer and named and other:
        raise ConfigError(
            f"{named[0]} needs vLLM itself with --use-vllm-tokenizer, not {other}; leave one of them out"
        )


def gpu_memory_service_is_installed(_: WorkerOptions, engine: EngineFlags) -> None:
    if engine.get("load_format") == "gms" and not flags.is_installed("gpu_memory_service"):
        raise ConfigError(
            "--load-format gms needs the package gpu_memory_service, which is not on PyPI; "
            "install it from the Dynamo sources or use another load format"
        )


def dump_has_a_folder(o: WorkerOptions, _: EngineFlags) -> None:
    if o.dump_config_to and not Path(o.dump_config_to).resolve().parent.is_dir():
        raise ConfigError(f"--dump-config-to {o.dump_config_to}: there is no such folder")


def model_is_named(o: WorkerOptions, _: EngineFlags) -> None:
    if not o.model:
        raise ConfigError("--model is missing; give a folder or a hub id")


def name_fits_the_frontends_cache(o: WorkerOptions, _: EngineFlags) -> None:
    """Frontends keep a model's files in a folder of its name. Without it they answer 404, and say why only in
    their log.
    """
    name = (o.served_model_name or (o.model or "",))[0]
    taken, most = len(addresses.slug(name)), addresses.MAX_FILE_NAME
    if not o.card.is_listed or taken <= most:
        return
    if o.served_model_name:
        what = f"--served-model-name {name[:20]}… is too long: its first name has"
        fix = "give a shorter one first; further names may be longer"
    else:
        what, fix = f"--model {name} is also the name for clients, which has", "add --served-model-name NAME"
    raise ConfigError(f"{what} {taken} characters, and frontends take {most}; {fix}")


def model_is_a_folder_or_a_hub_id(o: WorkerOptions, _: EngineFlags) -> None:
    model = o.model or ""
    if Path(model).is_dir():
        return
    fix = None
    if "://" in model:
        fix = "is a URL, which is not supported; copy the model into a folder and give that"
    elif model.endswith(".gguf"):
        fix = "is a GGUF file, which vLLM 0.30 does not read; give a folder or a hub id with safetensors"
    elif ":" in model and not model.startswith(("/", ".", "~")):
        fix = "names a file of a GGUF repository, which vLLM 0.30 does not read; give one with safetensors"
    if fix:
        raise ConfigError(f"--model {model} {fix}")


def tokenizer_is_of_the_same_revision(o: WorkerOptions, engine: EngineFlags) -> None:
    """The frontend reads it from the model's folder, and so does vLLM then."""
    wanted, given = engine.get("tokenizer_revision"), engine.get("revision") or "main"
    if wanted is None or "tokenizer" in engine or Path(o.model or "").is_dir():
        return
    if wanted != given:
        raise ConfigError(
            f"--tokenizer-revision {wanted} is not the model's --revision {given}: "
            "the tokenizer comes with the model; give both the same, or a folder with the files that you want"
        )


RULES = (
    known_endpoint_types,
    template_exists,
    address_has_three_parts,
    budgets_are_positive,
    worker_threads_are_a_count,
    card_port_needs_a_system_port,
    engines_are_a_count,
    worker_traces_have_an_address,
    worker_migration_is_a_count,
    fake_settings_need_the_fake_engine,
    fake_engine_takes_no_engine_flags,
    embeds_need_vllm_in_token_mode,
    text_is_parsed_by_vllm,
    gpu_memory_service_is_installed,
    dump_has_a_folder,
    model_is_named,
    name_fits_the_frontends_cache,
    model_is_a_folder_or_a_hub_id,
    tokenizer_is_of_the_same_revision,
)

"""Every rule over several options refuses what it should, and only its own removal lets it pass."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dynamo_vllm.config import build, checks, worker_plan
from dynamo_vllm.config.encoders import EncoderFolder, OtherConnector
from dynamo_vllm.config.options import (
    AdminOptions,
    ConsoleOptions,
    ExportOptions,
    FrontendOptions,
    GatewayOptions,
    LoadOptions,
    PlaneOptions,
    PoolingBenchOptions,
    ResetOptions,
    RoutingOptions,
    ScaleOptions,
    ServeOptions,
    SleepOptions,
    WorkerOptions,
)
from dynamo_vllm.config.options.gateway.keys import (
    CreateKeyOptions,
    DatabaseOptions,
    ListKeysOptions,
    RotateKeyOptions,
    TenantOptions,
)
from dynamo_vllm.config.options.gateway.usage import UsageOptions
from dynamo_vllm.config.options.kv_cache import OWN_FOLDER, DiskSpace
from dynamo_vllm.config.rules import (
    admin,
    bench_local,
    connectors,
    flags,
    kv_tiers,
    lora,
    media,
    media_limits,
    ranks,
)
from dynamo_vllm.config.rules import bench as bench_rules
from dynamo_vllm.config.rules import export as export_rules
from dynamo_vllm.config.rules import frontend as frontend_rules
from dynamo_vllm.config.rules import omni as omni_rules
from dynamo_vllm.config.rules import serve as serve_rules
from dynamo_vllm.config.rules import worker as worker_rules
from dynamo_vllm.config.rules.gateway import keys as keys_rules
from dynamo_vllm.config.rules.gateway import serving as gateway
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Words = str | list[str]
    """A list where a word has a blank."""
    Cases = dict[Callable[..., object], list[tuple[Words, str]]]
    """By rule: words that it refuses, and what it says."""

NODE_1 = "--headless -dp 2 -dpl 1 -dpr 1 -dpa 10.0.0.1"
EC = "--enable-multimodal --vllm-native-encoder-worker"
ENCODER = f"{EC} --ec-storage-path folder"
PRODUCES = '--ec-transfer-config {"ec_role":"ec_producer"}'
FROM_TO = "--config serve.yaml -o out"
TRACE = "--trace f"
WORKER: Cases = {
    worker_rules.worker_threads_are_a_count: [("--runtime-threads 0", "must be 1 or more")],
    worker_rules.engines_are_a_count: [("--engines-here 0", "must be 1 or more")],
    worker_rules.card_port_needs_a_system_port: [
        ("--card-port 9091", "needs --system-port"),
        ("--card-port 40000 --system-port 9090", "from 1 to 32767"),
        ("--card-port 9090 --system-port 9090", "differs from --system-port"),
    ],
    worker_rules.worker_traces_have_an_address: [("--otlp-endpoint host:4317", "is not a URL")],
    admin.token_can_be_sent: [
        (["--admin-token", ""], "--admin-token is empty"),
        (["--admin-token", "two words"], "without spaces"),
        ("--admin-token grün", "without spaces"),
        (["--admin-token", "line\n"], "without spaces"),
    ],
    worker_rules.embeds_need_vllm_in_token_mode: [
        ("--enable-prompt-embeds --engine fake", "the fake engine takes tokens only"),
        ("--enable-prompt-embeds --use-vllm-tokenizer", "cannot be combined with --use-vllm-tokenizer"),
    ],
    worker_rules.text_is_parsed_by_vllm: [
        (
            "--use-vllm-tokenizer --tool-call-parser hermes --engine fake",
            "--tool-call-parser needs vLLM itself",
        ),
        ("--use-vllm-tokenizer --reasoning-parser qwen3 --omni", "with --use-vllm-tokenizer, not --omni"),
    ],
    lora.adapter_size_is_a_size: [
        ("--lora-max-gb 0", "--lora-max-gb 0.0 must be above 0"),
        ("--lora-max-gb nan", "--lora-max-gb nan must be above 0"),
    ],
    worker_rules.dump_has_a_folder: [("--dump-config-to /no/such/folder/x", "there is no such folder")],
    lora.adapters_are_switched_on: [
        ("--lora-modules a=/x", "needs --enable-lora"),
        ("--lora-enabled --no-enable-lora", "contradicts"),
    ],
    lora.adapters_have_names: [
        ("--enable-lora --lora-modules /x", "is not NAME=URI"),
        ("--enable-lora --lora-modules a=", "is not NAME=URI"),
        ("--enable-lora --lora-modules a=/x a=/y", "'a' twice"),
    ],
    ranks.kv_events_can_be_read: [
        ('--kv-events-config {"endpoint":"tcp://127.0.0.1:5557"}', "write tcp://*:PORT"),
        (NODE_1 + ' --kv-events-config {"endpoint":"tcp://*:5557"}', "; write tcp://10.0.0.1:PORT"),
    ],
    connectors.connector_is_installed: [
        ("--connector nixl kvbm", "pip install 'dynamo-vllm[kvbm]'"),
        ('--kv-transfer-config {"kv_connector":"DynamoConnector"}', "pip install 'dynamo-vllm[kvbm]'"),
    ],
    connectors.lmcache_is_refused: [
        ("--connector lmcache nixl", "use --kv-offload-gb"),
        ('--kv-transfer-config {"kv_connector":"LMCacheConnectorV1"}', "answers are wrong"),
    ],
    connectors.lmcache_server_is_refused: [
        ('--kv-transfer-config {"kv_connector":"LMCacheMPConnector"}', "mixes up the caches")
    ],
    connectors.disaggregation_needs_a_connector: [
        ("--is-decode-worker --connector none", "add --connector nixl"),
        ("--disaggregation-mode prefill --connector null", "add --connector nixl"),
    ],
    connectors.disaggregation_takes_tokens: [
        ("--is-prefill-worker --engine fake --use-vllm-tokenizer", "--use-vllm-tokenizer cannot")
    ],
    connectors.written_connector_is_json: [("--kv-transfer-config {", "--kv-transfer-config is not JSON")],
    connectors.one_role: [
        ("--is-prefill-worker --is-decode-worker", "name different roles"),
        ("--is-prefill-worker --disaggregation-mode decode", "name different roles"),
        (
            "--enable-multimodal --disaggregation-mode decode --multimodal-encode-worker",
            "name different roles",
        ),
        (
            "--enable-multimodal --is-decode-worker --multimodal-encode-prefill-worker",
            "name different roles",
        ),
        ("--is-decode-worker --disaggregation-mode agg", "name different roles"),
    ],
    connectors.known_connectors: [
        ("--connector carrier-pigeon", "'carrier-pigeon' is unknown; choose from nixl")
    ],
    connectors.connectors_are_named_once: [("--connector nixl nixl", "names nixl twice")],
    connectors.one_offloader: [
        ("--connector lmcache kvbm", "give one of them"),
        ("--connector offload kvbm", "offload and kvbm each store caches"),
    ],
    kv_tiers.host_memory_is_a_size: [
        ("--kv-offload-gb 0", "0 is not a size; use a number above 0"),
        ("--connector kvbm --kv-offload-gb nan", "is not a size"),
    ],
    kv_tiers.tier_fits_memory: [
        ("--connector kvbm --kv-offload-gb 1e9", "1e+09 does not fit"),
        ("--kv-offload-gb 1e9", "does not fit into this machine's memory"),
    ],
    kv_tiers.disk_is_a_folder_and_a_size: [
        ("--kv-offload-disk /mnt/kv", "write it like /mnt/kv:500"),
        ("--kv-offload-disk /mnt/kv:0", "a size above 0"),
        ("--kv-offload-disk :5", ":5 is not PATH:GB"),
        ("--kv-offload-disk /mnt/kv:5GB", "is not PATH:GB"),
        ("--kv-offload-disk /mnt/kv:inf", "is not PATH:GB"),
    ],
    kv_tiers.disk_is_no_file: [(f"--kv-offload-disk {__file__}/kv:5", "is not a folder; name one")],
    kv_tiers.tier_fits_disk: [("--kv-offload-disk /tmp/kv:1e9", "/tmp/kv:1e+09 does not fit")],
    kv_tiers.tiers_are_of_roles_that_keep_caches: [
        (
            "--kv-offload-gb 1 --disaggregation-mode pooling",
            "a worker of the role pooling, which has no KV caches",
        ),
        ("--kv-offload-disk /tmp/kv:1 --disaggregation-mode transcription", "-disk /tmp/kv:1 cannot"),
        (f"{ENCODER} --kv-offload-gb 1", "--kv-offload-gb 1 cannot be combined with a worker"),
        ("--connector offload --disaggregation-mode pooling", "--connector offload cannot be combined"),
        ("--omni --kv-offload-gb 1", "--kv-offload-gb 1 cannot be combined with --omni"),
    ],
    kv_tiers.tiers_have_a_connector: [
        ("--kv-offload-gb 2 --connector none", "--connector none names none"),
        ('--kv-offload-gb 2 --kv-transfer-config {"kv_connector":"OffloadingConnector"}', "-gb 2 cannot"),
        ("--kv-offload-disk /tmp/kv:1 --connector kvbm", "combined with the connector kvbm"),
    ],
    kv_tiers.one_size_of_host_memory: [
        ("--kv-offload-gb 2 --kv-offloading-size 2", "cannot be combined with --connector offload"),
        ("--connector nixl --kv-offloading-size 2", "leave it out and give --kv-offload-gb"),
    ],
    kv_tiers.tiers_need_prefix_caching: [
        ("--kv-offload-gb 2 --no-enable-prefix-caching", "combined with the connector offload")
    ],
    kv_tiers.tiers_stay_on_one_machine: [
        ("--kv-offload-gb 2 -tp 2 --nnodes 2 --master-addr 10.0.0.1", "cannot serve an engine over 2 nodes")
    ],
    connectors.kvbm_has_one_rank: [
        ("--connector kvbm --data-parallel-size 2", "combined with the connector kvbm"),
        ('--kv-transfer-config {"kv_connector":"DynamoConnector"} -dp 4', "start a worker per rank"),
    ],
    connectors.kvbm_takes_plain_prompts: [
        ("--connector kvbm nixl --enable-lora", "--enable-lora cannot be combined with the connector kvbm"),
        ("--connector kvbm --enable-prompt-embeds", "--enable-prompt-embeds cannot be combined"),
    ],
    connectors.none_is_the_only_connector: [("--connector none nixl", "none cannot be combined with others")],
    connectors.one_source_of_connectors: [
        ("--connector nixl --kv-transfer-config {}", "cannot be combined with --kv-transfer-config")
    ],
    media.one_multimodal_role: [
        ("--enable-multimodal --multimodal-worker --ec-processor", "are different multimodal roles")
    ],
    media_limits.media_limits_are_limits: [
        ("--media-max-mb 0", "--media-max-mb 0.0 must be above 0"),
        ("--media-timeout-seconds nan", "must be above 0"),
        ("--media-max-seconds inf", "must be above 0"),
        ("--media-queue-seconds 0", "must be above 0"),
        ("--media-memory-mb 0", "must be above 0"),
        ("--media-max-megapixels 90", "is above 89"),
        ("--media-cache-mb -1", "must be 0 or more"),
    ],
    media_limits.media_counts_are_counts: [
        ("--media-max-images -1", "--media-max-images -1 must be 0"),
        ("--media-threads 0", "--media-threads 0 must be 1 or more"),
    ],
    media_limits.media_hosts_are_names: [
        ("--enable-multimodal --media-hosts http://example.com", "is not a host name; give only")
    ],
    media_limits.media_networks_are_networks: [
        ("--enable-multimodal --media-networks 10.0.0.1/8", "--media-networks '10.0.0.1/8' is not a network")
    ],
    media_limits.media_folder_is_a_folder: [
        ("--enable-multimodal --media-folder /no/such/folder", "there is no such folder"),
        ("--enable-multimodal --allowed-local-media-path /tmp/..", "would let clients read every file"),
    ],
    media.multimodal_needs_its_switch: [
        ("--media-networks 10.0.0.0/8", "--media-networks needs --enable-multimodal"),
        ("--multimodal-worker", "--multimodal-worker needs --enable-multimodal"),
        ("--frontend-decoding", "--frontend-decoding needs --enable-multimodal"),
        ("--disaggregation-mode encode", "--disaggregation-mode encode needs --enable-multimodal"),
        ("--ec-transfer-config.ec_role=ec_consumer", "--ec-transfer-config needs --enable-multimodal"),
    ],
    media.processors_are_the_frontend: [
        ("--enable-multimodal --ec-processor", "--ec-processor: the frontend has replaced this"),
        ("--enable-multimodal --multimodal-processor", "--multimodal-processor: the frontend"),
    ],
    media.encoders_share_a_folder: [
        (f"{EC} --ec-connector-backend ECExampleConnector", "encode needs --ec-storage-path FOLDER"),
        ("--enable-multimodal --multimodal-worker", "a worker that calls encode workers needs --ec-s"),
    ],
    media.encoder_cache_flags_need_encoders: [
        (
            "--ec-storage-path folder",
            "needs --disaggregation-mode encode, --route-to-encoder or --ec-consumer",
        ),
        (
            "--enable-multimodal --ec-transfer-config.ec_connector=ECExampleConnector",
            "without ec_producer or",
        ),
    ],
    media.encoder_transfer_is_consistent: [
        (
            f"{EC} --ec-storage-path=f --ec-connector-backend=A --ec-transfer-config.ec_connector=B",
            "A does not",
        ),
        (
            f"{EC} --ec-connector-backend ECMooncakeConnector --encoder-transfer nixl",
            "nixl cannot be combined",
        ),
        (f"{ENCODER} --ec-transfer-config.ec_role=ec_consumer", "ec_role ec_consumer does not match --dis"),
        (f"--enable-multimodal --is-decode-worker --connector nixl {PRODUCES}", "leave one of them out"),
        (f"--enable-multimodal --disaggregation-mode agg {PRODUCES}", "ec_producer does not match"),
        ("--enable-multimodal --ec-transfer-config.ec_role ec_both", "'ec_both' is not supported"),
        (ENCODER + " --ec-transfer-config {", "--ec-transfer-config is not JSON"),
    ],
    media.an_encoder_only_encodes: [
        (f"{ENCODER} --use-vllm-tokenizer", "--use-vllm-tokenizer cannot be combined with"),
        (f"{ENCODER} --connector nixl", "--connector nixl cannot be combined with"),
        (f"{ENCODER} --route-to-encoder", "--route-to-encoder cannot be combined with"),
        (f"{ENCODER} --enable-lora", "--enable-lora cannot be combined with"),
        (f"{ENCODER} -dp 2", "combined with --disaggregation-mode encode"),
    ],
    media.encoder_transfer_needs_encoders: [
        ("--enable-multimodal --encoder-transfer nixl", "nixl needs --disaggregation-mode encode")
    ],
    media.encoder_limits_are_limits: [
        (f"{ENCODER} --ec-storage-gb 0", "--ec-storage-gb 0.0 must be above 0"),
        (f"{ENCODER} --encoder-seconds nan", "--encoder-seconds nan must be above 0"),
    ],
    media.extra_encoder_config_is_known: [
        (ENCODER + " --ec-extra-config {", "--ec-extra-config is not JSON"),
        (f"{ENCODER} --ec-extra-config []", "must be a JSON object"),
        (ENCODER + ' --ec-extra-config {"nonsense":1}', "it takes only shared_storage_path"),
        (f"{ENCODER} --ec-transfer-config.ec_connector_extra_config.odd 1", "unknown setting odd"),
    ],
    omni_rules.stages_need_omni: [
        ("--stage-configs-path stages.yaml", "stages.yaml needs --omni"),
        ("--deploy-config deploy.yaml", "deploy.yaml needs --omni"),
    ],
    omni_rules.stage_file_exists: [("--omni --stage-configs-path no.yaml", "no.yaml: there is no such")],
    omni_rules.omni_has_no_connector: [
        ("--omni --connector nixl", "--omni: a pipeline transfers no KV caches"),
        ('--omni --kv-transfer-config {"kv_connector":"X"}', "--kv-transfer-config cannot"),
    ],
    omni_rules.omni_publishes_no_kv_events: [
        ("--omni --kv-events", "--omni: a pipeline publishes no KV events"),
        ("--omni --kv-event-port 20080", "--kv-event-port cannot be combined with --omni"),
        ("--omni --kv-events-config.publisher=zmq", "--kv-events-config cannot be combined with --omni"),
    ],
    omni_rules.omni_stays_on_one_node: [
        (f"--omni {NODE_1}", "--headless cannot be combined with --omni: all stages"),
        ("--omni --nnodes 2 --node-rank 1 --master-addr 10.0.0.1", "--nnodes cannot be combined"),
        ("--omni -dp 2 -dpl 1 -dpa 10.0.0.1", "--data-parallel-size-local cannot be combined with --omni"),
        ("--omni -dp 2 -dpn 1", "--data-parallel-rank cannot be combined with --omni"),
    ],
    omni_rules.omni_is_one_rank: [
        ("--omni -dp 2", "--data-parallel-size 2 cannot be combined with --omni: a pipeline has")
    ],
    omni_rules.omni_does_everything_of_a_request: [
        ("--omni --disaggregation-mode prefill", "prefill cannot be combined with --omni")
    ],
    omni_rules.omni_takes_text_only: [
        ("--omni --enable-prompt-embeds", "--enable-prompt-embeds cannot"),
        ("--omni --lora-enabled", "--lora-enabled cannot be combined with"),
        ("--omni --enable-lora", "--enable-lora cannot be combined with"),
        ("--omni --enable-multimodal", "--enable-multimodal cannot be combined"),
    ],
    omni_rules.omni_needs_its_own_engine: [("--omni --engine fake", "leave out --engine fake")],
    omni_rules.picture_bounds_are_counts: [
        ("--max-pictures 0", "--max-pictures 0 must be 1 or more"),
        ("--max-picture-megapixels 0", "--max-picture-megapixels 0.0 must be above 0"),
        ("--max-video-megapixels -1", "--max-video-megapixels -1.0 must be above 0"),
        ("--max-picture-side -8", "--max-picture-side -8 must be"),
        ("--max-picture-steps 0", "--max-picture-steps 0 must be"),
    ],
    ranks.kv_event_port_is_registered: [
        ("--kv-event-port 1023", "DYN_VLLM_KV_EVENT_PORT=1023 is out of range"),
        ("--kv-event-port 49152", "use 1024 to 49151"),
    ],
    connectors.side_channel_port_is_a_port: [
        ("--side-channel-port 0", "0 is not a port; use 1 to 65535"),
        ("--side-channel-port 65536", "65536 is not a port"),
    ],
    ranks.kv_events_have_one_source: [
        ("--kv-events-config {} --kv-event-port 20080", "--kv-events-config already configures"),
        ("--kv-events-config={} --no-kv-events", "already configures KV events"),
    ],
    worker_rules.known_endpoint_types: [("--endpoint-types chat smoke", "'smoke' is unknown")],
    worker_rules.template_exists: [
        ("--custom-jinja-template /no/such/file", "/no/such/file: there is no such file")
    ],
    worker_rules.address_has_three_parts: [
        ("--endpoint dyn://only.two", "write --endpoint dyn://namespace.component.endpoint"),
        ("--endpoint dyn://a..c", "is not an address"),
        ("--encoder-component dyn://only.two", "; write --encoder-component dyn://namespace"),
    ],
    worker_rules.budgets_are_positive: [
        ("--health-seconds 0", "--health-seconds 0.0 must be above 0"),
        ("--canary-seconds -1", "--canary-seconds -1.0 must be above 0"),
        ("--drain-seconds -1", "--drain-seconds -1.0 must be 0 or more"),
        ("--drain-seconds inf", "inf must be 0 or more, and finite"),
        ("--canary-seconds nan", "nan must be above 0"),
    ],
    worker_rules.worker_migration_is_a_count: [
        ("--migration-limit -1", "--migration-limit -1 must be 0 or more")
    ],
    worker_rules.fake_settings_need_the_fake_engine: [
        ("--fake-engine {}", "add --engine fake or leave it out"),
        ("--engine fake --fake-engine {", "is not JSON"),
    ],
    worker_rules.fake_engine_takes_no_engine_flags: [
        ("--engine fake --block-size 8", "--block-size is a flag of")
    ],
    worker_rules.gpu_memory_service_is_installed: [
        ("--load-format gms", "needs the package gpu_memory_service")
    ],
    connectors.lease_leaves_time_to_fetch: [("--kv-lease-seconds 1", "use 2 or more")],
    connectors.local_prefill_is_not_negative: [("--local-prefill-tokens 0", "must be 1 or more")],
    ranks.kv_events_of_each_rank_have_a_port: [
        ('-dp 2 --kv-events-config {"endpoint":"ipc:///run/x"}', "one address for several ranks")
    ],
    ranks.ranks_are_distributed_one_way: [
        ("-dp 4 -dpl 2 --data-parallel-hybrid-lb -dpn 1", "-lb are different ways"),
        ("-dp 2 --data-parallel-rank 1 -dpa 10.0.0.1 --headless", "--headless cannot"),
    ],
    ranks.one_worker_per_process: [
        ("-dp 2 --data-parallel-multi-port-external-lb", "start one worker per rank")
    ],
    ranks.node_rank_is_one_of_the_nodes: [
        ("--nnodes 2 --node-rank 2 --master-addr 10.0.0.1", "for --nnodes 2; use 0 to 1"),
        ("--node-rank 1 --master-addr 10.0.0.1", "give the number of nodes with --nnodes"),
    ],
    ranks.headless_belongs_to_a_worker: [
        ("--headless", "name its place: --nnodes N --node-rank 1"),
        ("--headless -tp 2 --nnodes 2 --master-addr 10.0.0.1", "name its place: --nnodes N --node-rank 1"),
        ("--headless --engine fake", "name its place"),
    ],
    ranks.start_rank_needs_a_count: [
        ("--headless -dp 2 -dpr 1 -dpa 10.0.0.1", "rank 1 needs --data-parallel-size-local")
    ],
    ranks.ranks_of_a_node_are_among_all: [
        ("--headless -dp 2 -dpl 2 -dpr 1 -dpa 10.0.0.1", "2 ranks from rank 1 on, of --data-parallel-size 2"),
        ("-dp 2 -dpn 2", "1 ranks from rank 2 on"),
    ],
    ranks.several_nodes_name_their_leader: [
        ("--headless -dp 2 -dpl 1 -dpr 1", "add --data-parallel-address ADDRESS"),
        ("-dp 2 -dpl 1", "add --data-parallel-address ADDRESS"),
        ("-tp 2 --nnodes 2", "add --master-addr ADDRESS on every node"),
    ],
    ranks.events_of_other_nodes_reach_the_leader: [
        ("-dp 2 -dpl 1 -dpa fd00::1", "give an IPv4 address of the leader, or add --no-kv-events")
    ],
    media.the_frontend_decodes_for_one_engine: [
        ("--enable-multimodal --frontend-decoding --use-vllm-tokenizer", "with --frontend-decoding")
    ],
    media.media_template_has_a_prompt: [
        ("--enable-multimodal --mm-prompt-template <image>", "'<image>' must contain <prompt> exactly once"),
        (
            f"--enable-multimodal --mm-prompt-template <prompt> --custom-jinja-template {__file__}",
            "with --mm",
        ),
    ],
    worker_rules.model_is_named: [("--model=", "--model is missing")],
    worker_rules.name_fits_the_frontends_cache: [
        (f"--served-model-name {'n' * 256} short", "256 characters, and frontends take 255"),
        ("--model=/" + "m/" * 140, "add --served-model-name NAME"),
    ],
    worker_rules.model_is_a_folder_or_a_hub_id: [
        ("--model=s3://bucket/m", "copy the model into a folder"),
        ("--model=/m/chat-Q4.gguf", "is a GGUF file"),
        ("--model=team/chat-GGUF:Q4_K_M", "a GGUF repository"),
    ],
    worker_rules.tokenizer_is_of_the_same_revision: [
        ("--model=team/chat --revision=v1 --tokenizer-revision=v2", "v2 is not the model's --revision v1"),
        ("--model=team/chat --tokenizer-revision=v2", "the model's --revision main"),
    ],
}
FRONTEND: Cases = {
    frontend_rules.router_knows_adapters: [
        ("--router least-loaded --lora-enabled", "does not know which worker has a LoRA adapter")
    ],
    frontend_rules.frontend_hosts_and_networks_are_valid: [
        ("--media-hosts http://a.example", "is not a host name"),
        ("--media-networks a.example", "is not a network"),
    ],
    frontend_rules.port_is_known: [("--port 0", "name one")],
    frontend_rules.unreachable_is_a_time: [("--unreachable-seconds -1", "must be 0 or more")],
    frontend_rules.tls_needs_both_files: [
        (f"--tls-cert-path {__file__}", "go together"),
        (f"--tls-key-path {__file__}", "go together"),
    ],
    frontend_rules.thresholds_are_shares: [
        ("--busy-blocks 1.5", "--busy-blocks 1.5 is not a share"),
        ("--busy-blocks 0", "--busy-blocks 0.0 is not a share"),
    ],
    frontend_rules.tier_weights_are_shares: [
        ("--router-host-cache-weight 1.5", "from 0 to 1"),
        ("--router-disk-cache-weight=-0.1", "-0.1 is not a share"),
        ("--router-disk-cache-weight nan", "nan is not a share"),
    ],
    frontend_rules.frontend_traces_have_an_address: [(["--otlp-endpoint", ""], "is not a URL")],
    frontend_rules.frontend_threads_are_a_count: [("--runtime-threads 0", "must be 1 or more")],
    frontend_rules.frontend_migration_is_a_count: [("--migration-limit -1", "must be 0 or more")],
    frontend_rules.numbers_are_large_enough: [
        ("--router-temperature -0.1", "must be 0 or more"),
        ("--router-temperature inf", "inf must be 0 or more"),
        ("--drain-seconds inf", "inf must be 0 or more"),
        ("--drain-seconds=-3", "-3.0 must be 0 or more"),
        ("--max-body-mb 0", "--max-body-mb 0 must be 1 or more"),
        ("--error-wait-ms=-1", "-1 must be 0 or more"),
        ("--router-ttl-seconds nan", "nan must be 0 or more"),
        ("--router-queue-seconds=-1", "must be 0 or more"),
        ("--kv-overlap-credit=-1", "must be 0 or more"),
        ("--router-request-blocks=-1", "must be 0 or more"),
        ("--kv-overlap-weight=-1", "--kv-overlap-weight -1.0 must"),
        ("--busy-prefill-tokens=-1", "must be 0 or more"),
        ("--migration-max-seq-len 0", "must be 1 or more"),
    ],
    frontend_rules.certificate_is_there: [
        (f"--tls-cert-path gone.pem --tls-key-path {__file__}", "gone.pem: there is no such file")
    ],
    frontend_rules.local_prefill_is_a_count: [
        ("--local-prefill-tokens 0", "--local-prefill-tokens 0 must be 1 or more")
    ],
    frontend_rules.local_prefill_needs_the_kv_router: [
        ("--local-prefill-tokens 9 --router random", "--local-prefill-tokens needs --router kv")
    ],
}
EXPORT: Cases = {
    export_rules.file_and_folder_are_given: [
        ("-o out", "--config FILE is missing"),
        ("--config serve.yaml", "-o FOLDER is missing"),
    ],
    export_rules.names_are_valid: [
        (f"{FROM_TO} --name My_Model", "--name 'My_Model' is not a valid Kubernetes name"),
        (f"{FROM_TO} --hf-secret {'a' * 40}", "at most 36 lower-case letters"),
    ],
    export_rules.numbers_are_above_zero: [
        (f"{FROM_TO} --frontends 0", "--frontends 0 must be above 0"),
        (f"{FROM_TO} --start-seconds nan", "nan must be above 0"),
    ],
    export_rules.shared_memory_fits: [
        (f"{FROM_TO} --worker-memory-gb 8", "--worker-memory-gb 8 must be larger than --shm-gb 8")
    ],
    export_rules.etcd_has_addresses: [
        (f"{FROM_TO} --discovery etcd", "add --etcd http://HOST:2379"),
        (f"{FROM_TO} --etcd http://etcd:2379", "needs --discovery etcd"),
    ],
    export_rules.servers_have_addresses: [
        (f"{FROM_TO} --discovery etcd --etcd etcd:2379", "server; write http://HOST:2379"),
        (f"{FROM_TO} --nats nats:4222", "--nats 'nats:4222' is not the address of a server"),
    ],
    export_rules.operator_chooses_discovery: [
        (f"{FROM_TO} --operator --discovery etcd --etcd http://e:2379", "leave --discovery out")
    ],
    export_rules.one_place_ends_tls: [
        (f"{FROM_TO} --gateway-api public --gateway-tls-secret certificate", "leave --gateway-tls-secret out")
    ],
    export_rules.hostname_is_of_a_route: [
        (f"{FROM_TO} --hostname models.example.com", "needs --gateway-api")
    ],
}
SERVE: Cases = {
    serve_rules.worker_counts_are_counts: [
        ("--workers 0", "--workers 0 must be 1 or more"),
        ("--prefill 0 --decode 1", "--prefill 0 must be 1 or more"),
        ("--prefill 1 --decode=-1", "--decode -1 must be 1 or more"),
    ],
    serve_rules.prefill_and_decode_go_together: [
        ("--prefill 2", "--prefill 2 needs workers that answer; add"),
        ("--decode 2", "--decode 2 needs workers that compute"),
    ],
    serve_rules.workers_or_roles: [
        ("--workers 2 --prefill 1 --decode 1", "--workers 2 cannot be combined with --prefill and --decode")
    ],
    serve_rules.model_or_demo: [("--demo lora --model m", "--demo lora has its own model")],
    serve_rules.restarts_are_a_count: [("--restarts -1", "--restarts -1 must be 0 or more")],
    serve_rules.logs_have_bounds: [
        ("--log-mb -1", "--log-mb -1.0 must be 0 or more"),
        ("--log-parts -1", "--log-parts -1 must be 0 or more"),
        ("--keep-runs -1", "--keep-runs -1 must be 0 or more"),
    ],
    serve_rules.patience_is_positive: [
        ("--hang-seconds 0", "--hang-seconds 0.0 must be above 0"),
        ("--unwell-seconds -1", "--unwell-seconds -1.0 must be above 0"),
    ],
    serve_rules.retry_time_is_positive: [("--retry-seconds 0", "--retry-seconds 0.0 must be above 0")],
    serve_rules.start_has_time: [
        ("--start-seconds 0", "--start-seconds 0.0 must be above 0"),
        ("--start-seconds nan", "--start-seconds nan must be above 0"),
    ],
}
LOAD: Cases = {
    bench_rules.counts_are_counts: [
        ("--requests 0", "--requests 0 must be 1 or more"),
        ("--input-tokens 0", "--input-tokens 0 must be 1 or more"),
        ("--warmup=-1", "--warmup -1 must be 0 or more"),
        ("--clients 0", "--clients 0 must be 1 or more"),
    ],
    bench_rules.times_are_times: [
        ("--seconds 0", "--seconds 0.0 must be above 0"),
        ("--trace-speed nan", "--trace-speed nan must be above 0"),
    ],
    bench_rules.one_kind_of_load: [("--rate 1 --ramp 1:2:2", "--rate and --ramp are different")],
    bench_rules.trace_has_a_file: [
        ("--prompts trace", "--prompts trace needs --trace FILE"),
        ("--trace f", "add --prompts trace"),
    ],
    bench_rules.written_values_can_be_read: [
        ("--concurrency 1,0", "--concurrency '1,0' must be whole"),
        ("--concurrency 1.5", "--concurrency '1.5' must be whole"),
        ("--rate 1,,2", "--rate '1,,2' must be numbers above 0"),
        ("--rate inf", "--rate 'inf' must be numbers above 0"),
        ("--ramp 1:2", "--ramp '1:2' is not A:B:STEPS"),
        ("--ramp 1:inf:2", "--ramp '1:inf:2' is not A:B:STEPS"),
        ("--slo ttft=nan", "--slo 'ttft=nan' is not NAME=MS"),
        ("--ramp 0:2:2", "--ramp '0:2:2' is not A:B:STEPS"),
        ("--vocab 9:9", "--vocab '9:9' is not A:B"),
        ("--slo ttft=1,x=2", "--slo 'x=2' is not NAME=MS"),
        ("--slo ttft", "--slo 'ttft' is not NAME=MS"),
        ("--watch 12", "--watch '12' is not LABEL=PID"),
        ("--watch a=1 --watch a=2", "--watch names 'a' twice"),
        ("--body {", "--body is not JSON"),
        ("--body []", "--body must be a JSON object"),
    ],
}
PLANE: Cases = {
    bench_local.plane_counts_are_counts: [
        ("--rounds 0", "--rounds 0 must be 1 or more"),
        ("--tokens-per-frame -1", "--tokens-per-frame -1"),
    ],
    bench_local.peers: [
        ("--peer upstream", "'upstream' is not NAME=COMMAND"),
        ("--peer a=x --peer a=y", "'a=y' is not NAME=COMMAND"),
        ("--peer dynamo-vllm=x", "a unique name"),
        ("--peer a='x", "cannot be split into words: No closing quotation"),
    ],
}
POOLING: Cases = {
    bench_local.pooling_counts_are_counts: [
        ("--items 0", "--items 0 must be 1 or more"),
        ("--timeout 0", "--timeout 0.0 must be above 0"),
    ],
    bench_local.servers: [
        ("--server there", "'there' is not URL, or NAME=URL"),
        ("--server a=http://x --server a=http://y", "a unique name"),
    ],
    bench_rules.watched: [("--watch worker", "'worker' is not LABEL=PID")],
}
SCALE: Cases = {
    bench_local.scale_counts_are_counts: [
        ("--streams 0", "--streams 0 must be 1 or more"),
        ("--cached-blocks -1", "--cached-blocks -1 must be 0 or more"),
        ("--token-ms nan", "--token-ms nan must be 0 or more"),
        ("--max-seconds 0", "--max-seconds 0.0 must be above 0"),
    ],
    bench_local.ramp_has_one_request_per_stream: [("--ramp-seconds 9 --requests 5", "leave --requests out")],
    bench_local.frontend_counts: [
        ("--frontends 1,x", "'1,x' is not a list of different counts"),
        ("--frontends 2,2", "--frontends '2,2' is not a list"),
    ],
    bench_local.worker_counts: [
        ("--workers 0", "--workers '0' is not a list of different counts"),
        (["--workers", ""], "such as 1,2,4"),
    ],
}
ROUTING: Cases = {
    bench_local.routing_counts_are_counts: [
        (f"{TRACE} --workers 0", "--workers 0 must be 1 or more"),
        (f"{TRACE} --rate-scale 0", "--rate-scale 0.0 must be above"),
        (f"{TRACE} --rate -2", "--rate -2.0 must be above 0"),
        (f"{TRACE} --cache-blocks 0", "must be 1 or more"),
        (f"{TRACE} --kv-offload-gb 0", "must be above 0"),
    ],
    bench_local.routing_has_a_trace: [([], "--trace FILE is needed")],
    bench_local.only_a_simulation_has_its_options: [
        (f"{TRACE} --prefill-workers 1", "--prefill-workers is for --simulate"),
        (f"{TRACE} --simulate --model m", "--simulate runs no engine"),
    ],
    bench_local.modes: [
        (f"{TRACE} --mode fast", "'fast' is not a router; use kv, round-robin"),
        (f"{TRACE} --mode kv --mode kv", "needs a unique name"),
        (["--trace", "f", "--mode", "=--router kv"], "needs a unique name"),
    ],
    bench_local.engine_args: [(f"{TRACE} --engine-args '", "cannot be split into words")],
}
GATEWAY: Cases = {
    gateway.gateway_numbers_are_large_enough: [("--max-connections 0", "--max-connections")],
    gateway.headers_have_a_bound: [("--header-kb 9000", "8192 or less")],
    gateway.keys_are_long_enough: [("--api-key short", "8 or more")],
    gateway.open_has_no_keys: [("--open --api-key long-enough-key", "without a key")],
    gateway.frontends_are_addresses: [("--frontend localhost:8000", "http://HOST:PORT")],
    gateway.origins_are_origins: [("--cors-origin page.example", "https://HOST")],
    gateway.gateway_tls_needs_both_files: [(f"--tls-cert-path {__file__}", "go together")],
    gateway.gateway_certificate_is_there: [
        ("--tls-cert-path /nowhere/c.pem --tls-key-path /nowhere/k.pem", "no such file")
    ],
    gateway.parts_share_a_folder: [("--part envoy", "--gateway-dir")],
}
FIND: Cases = {
    admin.deployment_is_named_once: [("--run-dir /r --file-kv /f", "give one of them")],
    admin.run_folders_have_files: [("--run-dir /r --discovery-backend etcd", "leave one of them out")],
    admin.token_can_be_sent: [(["--admin-token", ""], "--admin-token is empty")],
    admin.others_can_be_found: [("--discovery-backend mem", "works inside one process only")],
}
CONSOLE: Cases = {
    admin.console_has_a_port: [("--console-port 70000", "--console-port 70000 is not a port")],
    admin.others_log_in: [("--console-host 0.0.0.0", "give --admin-token, with which one logs in")],
    admin.console_hosts_are_names: [("--console-hosts http://c.example", "give the name of a host")],
    admin.grafana_is_an_address: [("--console-grafana javascript:x", "is not the address of a page")],
}
OF_WORKERS: Cases = {
    admin.one_worker_or_all: [("--all --worker 1", "cannot be combined")],
    admin.wait_has_time: [
        ("--timeout 0", "--timeout 0.0 must be above 0"),
        ("--timeout nan", "--timeout nan must be above 0"),
    ],
}
OF_SLEEP: Cases = {
    admin.sleep_has_a_level: [("--level 3", "--level 3 is unknown")],
    admin.drain_is_not_negative: [
        ("--drain-seconds -1", "must be 0 or more"),
        ("--drain-seconds inf", "and finite"),
        ("--drain-seconds nan", "and finite"),
    ],
}
OF_RESET: Cases = {admin.caches_are_known: [("--kind disk", "--kind disk is unknown; choose from prefix")]}
DATABASE: Cases = {keys_rules.database_has_an_address: [("--database gateway.db", "use sqlite:///FILE")]}
USAGE: Cases = {
    keys_rules.database_has_an_address: [("--database sqlite:///", "is not an address")],
    keys_rules.days_are_in_order: [
        ("--since yesterday", "write a date such as"),
        ("--since 2026-02-01 --until 2026-02-01", "is not after --since"),
    ],
    keys_rules.one_format: [("--csv --json", "cannot be combined")],
}
CREATE_KEY: Cases = {
    keys_rules.limits_are_counts: [("--tokens-per-day 0", "leave it out for no limit")],
    keys_rules.tenant_is_a_name: [(["--tenant", "a b"], "is not a name of a tenant")],
    keys_rules.expiry_is_a_duration: [
        ("--expires 30", "write for example 30d"),
        ("--expires 0d", "is over already"),
    ],
    keys_rules.scopes_have_names: [
        (["--model", " "], "--model is empty"),
        ("--endpoint=", "--endpoint is empty"),
    ],
}
TENANT: Cases = {keys_rules.limits_are_counts: [("--concurrent -1", "or 0 for no limit")]}
LIST_KEYS: Cases = {keys_rules.tenant_is_a_name: [("--tenant=", "is not a name of a tenant")]}
ROTATE_KEY: Cases = {keys_rules.grace_is_a_duration: [("--grace soon", "is not a duration")]}

TABLES: list[tuple[str, Callable[..., None], type[object], Cases]] = [
    ("FRONTEND_RULES", checks.check_frontend, FrontendOptions, FRONTEND),
    ("GATEWAY_RULES", checks.check_gateway, GatewayOptions, GATEWAY),
    ("EXPORT_RULES", checks.check_export, ExportOptions, EXPORT),
    ("SERVE_RULES", checks.check_serve, ServeOptions, SERVE),
    ("LOAD_RULES", checks.check_load, LoadOptions, LOAD),
    ("PLANE_RULES", checks.check_plane, PlaneOptions, PLANE),
    ("POOLING_RULES", checks.check_pooling_bench, PoolingBenchOptions, POOLING),
    ("SCALE_RULES", checks.check_scale, ScaleOptions, SCALE),
    ("ROUTING_RULES", checks.check_routing, RoutingOptions, ROUTING),
    ("FIND_RULES", checks.check_admin, AdminOptions, FIND),
    ("CONSOLE_RULES", checks.check_console, ConsoleOptions, CONSOLE),
    ("ADMIN_RULES", checks.check_admin, AdminOptions, OF_WORKERS),
    ("ADMIN_RULES", checks.check_admin, SleepOptions, OF_SLEEP),
    ("ADMIN_RULES", checks.check_admin, ResetOptions, OF_RESET),
    ("KEYS_RULES", checks.check_keys, DatabaseOptions, DATABASE),
    ("KEYS_RULES", checks.check_keys, UsageOptions, USAGE),
    ("KEYS_RULES", checks.check_keys, CreateKeyOptions, CREATE_KEY),
    ("KEYS_RULES", checks.check_keys, TenantOptions, TENANT),
    ("KEYS_RULES", checks.check_keys, ListKeysOptions, LIST_KEYS),
    ("KEYS_RULES", checks.check_keys, RotateKeyOptions, ROTATE_KEY),
]
"""The rules of each command, what runs them, its options, and refusals by each of them."""


@pytest.fixture(autouse=True)
def only_nixl_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "is_installed", lambda package: package == "nixl")


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has little."""
    monkeypatch.setattr(kv_tiers, "shared_memory_bytes", lambda: 1 << 40)


def split(words: Words) -> list[str]:
    return words.split() if isinstance(words, str) else words


def worker(words: Words) -> WorkerPlan:
    return worker_plan.parse(["--model", "m", *split(words)], {})


def options_of(cls: type[object], words: Words) -> object:
    options, rest = build.parse(cls, split(words), {}, "prog", "about")
    assert rest == []
    return options


def refusal(check: Callable[..., None], options: object, **more: bool) -> str:
    """What the check says; nothing where it finds no fault."""
    try:
        check(options, **more)
    except ConfigError as exc:
        return str(exc)
    return ""


def named(case: object) -> str:
    return getattr(case, "__name__", "")


@pytest.mark.parametrize(("rule", "cases"), WORKER.items(), ids=named)
def test_worker_rule_refuses_and_no_other_rule_would(
    rule: object, cases: list[tuple[Words, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [(worker(words), message) for words, message in cases]
    for plan, message in plans:
        assert message in refusal(checks.check_worker, plan)
    monkeypatch.setattr(checks, "WORKER_RULES", tuple(r for r in checks.WORKER_RULES if r is not rule))
    for plan, message in plans:
        assert message not in refusal(checks.check_worker, plan)


@pytest.mark.parametrize(
    ("rules", "check", "cls", "rule", "cases"),
    [
        pytest.param(rules, check, cls, *each, id=f"{rules}-{cls.__name__}-{named(each[0])}")
        for rules, check, cls, table in TABLES
        for each in table.items()
    ],
)
def test_rule_refuses_and_no_other_rule_would(
    rules: str,
    check: Callable[..., None],
    cls: type[object],
    rule: object,
    cases: list[tuple[Words, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [(options_of(cls, words), message) for words, message in cases]
    for options, message in given:
        assert message in refusal(check, options)
    monkeypatch.setattr(checks, rules, tuple(r for r in getattr(checks, rules) if r is not rule))
    for options, _ in given:
        assert refusal(check, options) == ""


def test_every_rule_has_a_case() -> None:
    covered: dict[str, set[object]] = {}
    for rules, _, _, table in TABLES:
        covered.setdefault(rules, set()).update(table)
    assert covered == {rules: set(getattr(checks, rules)) for rules in covered}
    # These need a machine without NIXL or with little shared memory; they have tests of their own.
    apart = {media.nixl_for_media_is_installed, kv_tiers.tier_fits_shared_memory}
    assert {*WORKER, *apart} == set(checks.WORKER_RULES)
    names = {name for name in vars(checks) if name.endswith("_RULES")}
    assert {"WORKER_RULES", "LOCAL_RULES", *covered} == names
    assert set(checks.LOCAL_RULES) <= {
        *checks.WORKER_RULES,
        *checks.FRONTEND_RULES,
        *checks.GATEWAY_RULES,
    }


@pytest.mark.parametrize("two", [("lmcache", "kvbm"), ("kvbm", "offload"), ("offload", "lmcache")])
def test_two_of_three_offloaders_are_refused_and_one_is_not(two: tuple[str, str]) -> None:
    for name in two:
        connectors.one_offloader(WorkerOptions(connector=("nixl", name)), {})
    with pytest.raises(ConfigError, match="give one of them") as refused:
        connectors.one_offloader(WorkerOptions(connector=("nixl", *two)), {})
    assert all(name in str(refused.value) for name in two)


@pytest.mark.parametrize(
    ("words", "connector"),
    [
        ("--kv-offload-gb 1", ("offload",)),
        ("--kv-offload-disk /kv:1", ("offload",)),
        ("--kv-offload-gb 1 --connector nixl", ("nixl", "offload")),
        ("--kv-offload-gb 1 --connector offload nixl", ("offload", "nixl")),
        ("--kv-offload-gb 1 --connector kvbm", ("kvbm",)),
        ("--kv-offload-gb 1 --connector lmcache", ("lmcache",)),
        ("--kv-offload-gb 1 --is-prefill-worker", ("nixl", "offload")),
        ("--kv-offload-gb 1 --is-decode-worker", ("nixl", "offload")),
        ("--kv-offload-gb 1 --connector none", ("none",)),
        ("--kv-offload-gb 1 --disaggregation-mode pooling", ()),
        ("--connector offload", ("offload",)),
    ],
)
def test_size_of_a_tier_names_its_connector(words: str, connector: tuple[str, ...]) -> None:
    assert worker(words).options.connector == connector


def test_lmcache_by_the_option_of_vllm_is_refused_too() -> None:
    plan = worker("--kv-offloading-size 2 --kv-offloading-backend lmcache")
    assert "use --kv-offload-gb" in refusal(checks.check_worker, plan)


def test_tier_in_a_small_container_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kv_tiers, "shared_memory_bytes", lambda: 64 << 20)
    told = refusal(checks.check_worker, worker("--connector offload"))
    assert "--kv-offload-gb 5 does not fit into /dev/shm" in told and "0.1 GB are free" in told
    assert "docker run --shm-size=6g" in told and "medium: Memory" in told
    (tmp_path / "memory.max").write_text("3000000000\n")
    assert kv_tiers.memory_bytes(str(tmp_path)) == 3_000_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_tiers.memory_bytes(str(tmp_path)) == kv_tiers.memory_bytes("/nowhere")


def test_disk_with_less_room_is_told_unless_earlier_caches_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=100 * 10**9, free=20 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    large = DiskSpace(str(tmp_path / "kv"), 30)
    assert "GB are free there" in (kv_tiers.disk_warning(large) or "")
    assert kv_tiers.disk_warning(DiskSpace(large.path, 0.001)) is None
    (tmp_path / "kv").mkdir()
    assert kv_tiers.disk_warning(large) is not None
    (tmp_path / "kv" / "caches").mkdir()
    assert kv_tiers.disk_warning(large) is None


def failing(name: str, code: int) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), name)

    return call


@pytest.mark.parametrize(
    ("patched", "by", "message"),
    [
        ("os.access", lambda path, mode: False, "cannot be written; name another folder"),
        (
            "pathlib.Path.exists",  # behind the folder of another user
            failing("/mnt", errno.EACCES),
            "Permission denied: '/mnt'; check that the disk",
        ),
        ("shutil.disk_usage", failing("/mnt/kv", errno.EIO), "Input/output error"),
        ("shutil.disk_usage", lambda path: SimpleNamespace(total=9, free=9), "the whole disk has 0 GB"),
    ],
    ids=["of root", "no way to it", "unreadable", "too small"],
)
def test_lost_disk_is_refused_before_a_start_and_only_told_at_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patched: str, by: Callable[..., object], message: str
) -> None:
    plan = worker(f"--kv-offload-gb 0.1 --kv-offload-disk {tmp_path}/new/folder:0.1")
    monkeypatch.setattr(patched, by)
    told = refusal(checks.check_worker, plan)
    assert told.startswith(f"--kv-offload-disk {plan.options.kv_disk}") and message in told
    checks.check_worker(plan, starts=True)
    assert plan.options.kv_disk is not None and kv_tiers.disk_warning(plan.options.kv_disk) == told
    assert os.listdir(tmp_path) == []


def test_disk_that_hangs_is_refused_before_a_start_and_only_told_at_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    released = threading.Event()
    monkeypatch.setattr(kv_tiers, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(kv_tiers, "_nearest", lambda disk: Path("/" if released.wait(60) else "?"))
    plan = worker(f"--kv-offload-gb 0.1 --kv-offload-disk {tmp_path}:0.1")
    try:
        assert "no answer for 0.02 s; check that the disk" in refusal(checks.check_worker, plan)
        checks.check_worker(plan, starts=True)
    finally:
        released.set()


def test_what_cannot_be_the_folder_of_the_disk_is_refused(tmp_path: Path) -> None:
    file = worker(f"--kv-offload-gb 0.1 --kv-offload-disk {__file__}/kv:0.1")
    assert "is not a folder; name one" in refusal(checks.check_worker, file, starts=True), "also at a start"
    plan = worker(f"--kv-offload-gb 0.1 --kv-offload-disk {tmp_path}:0.1")
    theirs = tmp_path / OWN_FOLDER
    theirs.mkdir(mode=0o700)
    checks.check_worker(plan)
    theirs.chmod(0o777)
    told = refusal(checks.check_worker, plan)
    assert f"{theirs} may belong to another user; remove it, or name another folder" in told


CERTIFICATE = "--tls-cert-path /models/c.pem --tls-key-path /models/k.pem"


@pytest.mark.parametrize(
    ("check", "options"),
    [
        (checks.check_worker, worker("--custom-jinja-template /models/chat.jinja")),
        (checks.check_worker, worker("--kv-offload-gb 1000000 --kv-offload-disk /dev/null/kv:1e9")),
        (checks.check_frontend, options_of(FrontendOptions, CERTIFICATE)),
        (checks.check_gateway, options_of(GatewayOptions, CERTIFICATE)),
    ],
    ids=["template", "tiers", "frontend", "gateway"],
)
def test_what_runs_elsewhere_needs_nothing_here(check: Callable[..., None], options: object) -> None:
    told = refusal(check, options)
    assert "no such file" in told or "does not fit" in told
    check(options, elsewhere=True)


@pytest.mark.parametrize(
    "words",
    [
        "--frontend-decoding",
        "--route-to-encoder --ec-storage-path folder --encoder-transfer nixl",
        "--connector nixl",
    ],
)
def test_packages_that_are_missing_here_are_missing_for_a_start_only(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "is_installed", lambda package: False)
    plan = worker(f"--enable-multimodal {words}")
    assert "not installed" in refusal(checks.check_worker, plan)
    checks.check_worker(plan, elsewhere=True)


def test_help_of_what_is_always_refused_says_so_and_what_to_use() -> None:
    helps = {item.name: item.option.help for item in build.declared(WorkerOptions)}
    for name in ("multimodal_processor", "ec_processor"):
        assert helps[name].startswith("Known and refused") and "start dynamo-vllm frontend" in helps[name]


def test_namespace_of_a_command_is_checked_too() -> None:
    assert "must be one word" in refusal(checks.check_find, AdminOptions(namespace="a.b"))


def test_settings_that_work_pass() -> None:
    for words in (
        "",
        "--disaggregation-mode agg",
        "--connector none",
        "--connector null",
        "--is-prefill-worker --engine fake --connector nixl",
        "--is-prefill-worker --connector nixl",
        "--is-prefill-worker --disaggregation-mode prefill --connector nixl",
        '--disaggregation-mode decode --kv-transfer-config {"kv_connector":"Mine"}',
        "--engine fake --connector kvbm",
        "--kv-offload-gb 0.1",
        "--connector offload --kv-offload-gb 0.1",
        "--kv-offload-gb 0.1 --kv-offload-disk /tmp/a:b:0.1",
        "--engine fake --kv-offload-gb 1e9 --kv-offload-disk /proc/nowhere:1e9",
        "--is-decode-worker --kv-offload-gb 0.1 -tp 2",
        '--kv-transfer-config {"kv_connector":"OffloadingConnector"}',
        "--kv-offloading-size 2",
        "--kv-offload-gb 0.1 -dp 2 -dpl 1 -dpa 10.0.0.1",
        "--kv-event-port 1024",
        "--kv-event-port 49151",
        "--endpoint dyn://a.b.c",
        "--omni --no-kv-events --connector none --nnodes 1 --node-rank 0 -tp 2",
        "--endpoint-types completions",
        f"--served-model-name {'n' * 255} {'alias' * 100}",
        f"--served-model-name {'é' * 300}{'n' * 255}",
        "--drain-seconds 0",
        "--engine fake --fake-engine {}",
        "--load-format dummy --max-model-len -1 --enforce-eager",
        "--use-vllm-tokenizer --system-port 0 --tool-call-parser hermes",
        "--enable-prompt-embeds --connector nixl --disaggregation-mode decode",
        "--revision v1 --tokenizer-revision v1",
        "--tokenizer team/words --tokenizer-revision v2",
        "-dp 2",
        NODE_1,
        NODE_1 + ' --kv-events-config {"endpoint":"tcp://10.0.0.1:5557"}',
        "-dp 2 -dpl 1 -dpa 10.0.0.1",
        "-dp 2 -dpl 1 -dpa fd00::1 --no-kv-events",
        "-dp 2 --data-parallel-rank 1",
        "-dp 4 -dpl 2 -dpr 2 --data-parallel-hybrid-lb",
        "-tp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1",
        "-tp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless",
    ):
        assert refusal(checks.check_worker, worker(words)) == "", words
    for words in (
        "",
        "--concurrency 1,8,32 --watch a=1 --watch b=2 --slo ttft=200,e2e=1.5",
        '--ramp 0.5:20:5 --body {"top_k":1}',
        "--prompts trace --trace f --rate 0.5,2",
    ):
        assert refusal(checks.check_load, options_of(LoadOptions, words)) == "", words
    others = "--console-host 0.0.0.0 --admin-token t --console-hosts c.example"
    assert refusal(checks.check_console, options_of(ConsoleOptions, others)) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--system-port -1", "--system-port -1 is out of range"),
        ("--system-port 70000", "--system-port 70000 is out of range"),
        ("--namespace a.b", "--namespace 'a.b' must be one word"),
        ("--namespace a/b", "--namespace 'a/b' must be one word"),
        ("--namespace=", "--namespace '' must be one word"),
        ("--bind-host 0.0.0.0", "--bind-host 0.0.0.0 is not an address that others can connect to"),
        ("--bind-host ::", "--bind-host :: is not an address"),
        ("--discovery-backend mem", "--discovery-backend mem works inside one process only"),
        ("--etcd-endpoints http://a:2379,b:2379", "'b:2379' is not the address of a server; write http://"),
        ("--etcd-endpoints=", "--etcd-endpoints '' is not the address"),
        ("--nats-server 10.0.0.1:4222", "'10.0.0.1:4222' is not the address of a server; write nats://"),
        ("--nats-server nats://a:x", "'nats://a:x' is not the address of a server"),
        ("--etcd-lease-seconds 4", "--etcd-lease-seconds 4 is too short; use 5 or more"),
    ],
)
def test_what_every_process_shares_is_checked_in_both(words: str, message: str) -> None:
    assert message in refusal(checks.check_worker, worker(words))
    assert message in refusal(checks.check_frontend, options_of(FrontendOptions, words))


def test_frontend_port_must_be_a_port() -> None:
    told = refusal(checks.check_frontend, options_of(FrontendOptions, "--port 65536"))
    assert told == "--port 65536 is not a port; use 0 to 65535"


def test_empty_list_of_endpoint_types_is_refused() -> None:
    options = build.from_values(WorkerOptions, {"model": "m", "endpoint_types": []}, {})
    told = refusal(checks.check_worker, WorkerPlan.of(options))
    assert told == "--endpoint-types is empty; give chat, completions or both"


def test_engine_flags_are_read_in_every_spelling() -> None:
    words = (
        "--block-size 16 --kv_cache_dtype=fp8 --enforce-eager --hf-overrides.a.b 1 --hf-overrides.a.c=x "
        "--hf-overrides.names+ d,e -tp 2"
    )
    assert flags.engine_flags(words.split()) == {
        "block_size": "16",
        "kv_cache_dtype": "fp8",
        "enforce_eager": None,
        "hf_overrides": '{"a": {"b": 1, "c": "x"}, "names": ["d", "e"]}',
        "tensor_parallel_size": "2",
    }
    pieces = ["--kv-transfer-config.kv_connector", "DynamoConnector", "--kv-transfer-config.kv_role=kv_both"]
    assert flags.engine_flags(pieces)["kv_transfer_config"] == (
        '{"kv_connector": "DynamoConnector", "kv_role": "kv_both"}'
    )
    assert "pip install 'dynamo-vllm[kvbm]'" in refusal(checks.check_worker, worker(pieces))


SHARED = '"ec_connector_extra_config":{"shared_storage_path":"/e"}'
CONSUMES = "--ec-transfer-config.ec_role=ec_consumer"


@pytest.mark.parametrize(
    ("words", "role", "side"),
    [
        (f'--ec-transfer-config {{"ec_role":"ec_producer",{SHARED}}}', "encode", "ec_producer"),
        (f'--ec-transfer-config {{"ec_role":"ec_consumer",{SHARED}}}', "agg", "ec_consumer"),
        ("--ec-transfer-config.ec_role ec_producer --ec-storage-path=/e", "encode", "ec_producer"),
        (f"{CONSUMES} --ec-storage-path=/e", "agg", "ec_consumer"),
        (
            f"--is-prefill-worker --connector nixl --ec-storage-path=/e {CONSUMES}",
            "prefill",
            "ec_consumer",
        ),
    ],
)
def test_side_of_the_hand_over_may_stand_in_the_engines_own_flag(words: str, role: str, side: str) -> None:
    plan = worker(f"--enable-multimodal {words}")
    checks.check_worker(plan)
    folder = plan.encoder_output
    assert plan.options.role == role
    assert isinstance(folder, EncoderFolder) and (folder.path, folder.connector_role) == ("/e", side)


@pytest.mark.parametrize(
    ("words", "role", "config"),
    [
        (
            '--ec-transfer-config {"ec_connector":"Mine","ec_role":"ec_producer","ec_port":5}',
            "encode",
            {"ec_role": "ec_producer", "ec_port": 5, "ec_connector_extra_config": {}},
        ),
        (
            '--ec-connector-backend Mine --ec-consumer-mode --ec-extra-config {"a":1}',
            "agg",
            {"ec_role": "ec_consumer", "ec_connector_extra_config": {"a": 1}},
        ),
        (
            "--ec-connector-backend Mine --route-to-encoder --ec-storage-path /e",
            "agg",
            {"ec_role": "ec_consumer", "ec_connector_extra_config": {"shared_storage_path": "/e"}},
        ),
    ],
)
def test_another_encoder_cache_connector_gets_all_its_settings(
    words: str, role: str, config: dict[str, object]
) -> None:
    plan = worker(f"--enable-multimodal {words}")
    checks.check_worker(plan)
    assert plan.options.role == role
    assert plan.encoder_output == OtherConnector("Mine", {"ec_connector": "Mine", **config})


def test_engine_that_is_both_sides_of_another_connector_needs_no_encode_worker() -> None:
    words = '--enable-multimodal --ec-transfer-config {"ec_connector":"ECCPUConnector","ec_role":"ec_both"}'
    plan = worker(words)
    checks.check_worker(plan)
    assert (plan.options.role, plan.encoder_output) == ("agg", None)
    ours = worker(words.replace("ECCPUConnector", "ECExampleConnector"))
    assert "ec_role 'ec_both' is not supported" in refusal(checks.check_worker, ours)

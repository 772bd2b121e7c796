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
from dynamo_vllm.config.rules import flags, kv_tiers, media
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Words = str | list[str]
    """A list where a word has a blank."""
    Cases = list[tuple[Words, str]]
    """Words that a rule refuses, and what it says."""
    Tables = tuple[tuple[type[object], Cases], ...]

NODE_1 = "--headless -dp 2 -dpl 1 -dpr 1 -dpa 10.0.0.1"
EC = "--enable-multimodal --vllm-native-encoder-worker"
ENCODER = f"{EC} --ec-storage-path folder"
PRODUCES = '--ec-transfer-config {"ec_role":"ec_producer"}'
FROM_TO = "--config serve.yaml -o out"
TRACE = "--trace f"
WORKER: Cases = [
    ("--runtime-threads 0", "must be 1 or more"),
    ("--engines-here 0", "must be 1 or more"),
    ("--card-port 9091", "needs --system-port"),
    ("--card-port 40000 --system-port 9090", "from 1 to 32767"),
    ("--card-port 9090 --system-port 9090", "differs from --system-port"),
    ("--otlp-endpoint host:4317", "is not a URL"),
    (["--admin-token", ""], "--admin-token is empty"),
    (["--admin-token", "two words"], "without spaces"),
    ("--admin-token grün", "without spaces"),
    (["--admin-token", "line\n"], "without spaces"),
    ("--enable-prompt-embeds --engine fake", "the fake engine takes tokens only"),
    ("--enable-prompt-embeds --use-vllm-tokenizer", "cannot be combined with --use-vllm-tokenizer"),
    ("--use-vllm-tokenizer --tool-call-parser hermes --engine fake", "--tool-call-parser needs vLLM itself"),
    ("--use-vllm-tokenizer --reasoning-parser qwen3 --omni", "with --use-vllm-tokenizer, not --omni"),
    ("--lora-max-gb 0", "--lora-max-gb 0.0 must be above 0"),
    ("--dump-config-to /no/such/folder/x", "there is no such folder"),
    ("--lora-modules a=/x", "needs --enable-lora"),
    ("--lora-enabled --no-enable-lora", "contradicts"),
    ("--enable-lora --lora-modules /x", "is not NAME=URI"),
    ("--enable-lora --lora-modules a=", "is not NAME=URI"),
    ("--enable-lora --lora-modules a=/x a=/y", "'a' twice"),
    ('--kv-events-config {"endpoint":"tcp://127.0.0.1:5557"}', "write tcp://*:PORT"),
    (NODE_1 + ' --kv-events-config {"endpoint":"tcp://*:5557"}', "; write tcp://10.0.0.1:PORT"),
    ("--connector nixl kvbm", "pip install 'dynamo-vllm[kvbm]'"),
    ('--kv-transfer-config {"kv_connector":"DynamoConnector"}', "pip install 'dynamo-vllm[kvbm]'"),
    ("--connector lmcache nixl", "use --kv-offload-gb"),
    ('--kv-transfer-config {"kv_connector":"LMCacheConnectorV1"}', "answers are wrong"),
    ('--kv-transfer-config {"kv_connector":"LMCacheMPConnector"}', "mixes up the caches"),
    ("--is-decode-worker --connector none", "add --connector nixl"),
    ("--disaggregation-mode prefill --connector null", "add --connector nixl"),
    ("--is-prefill-worker --engine fake --use-vllm-tokenizer", "--use-vllm-tokenizer cannot"),
    ("--kv-transfer-config {", "--kv-transfer-config is not JSON"),
    ("--is-prefill-worker --is-decode-worker", "name different roles"),
    ("--is-prefill-worker --disaggregation-mode decode", "name different roles"),
    ("--enable-multimodal --disaggregation-mode decode --multimodal-encode-worker", "name different roles"),
    ("--enable-multimodal --is-decode-worker --multimodal-encode-prefill-worker", "name different roles"),
    ("--is-decode-worker --disaggregation-mode agg", "name different roles"),
    ("--connector carrier-pigeon", "'carrier-pigeon' is unknown; choose from nixl"),
    ("--connector nixl nixl", "names nixl twice"),
    ("--connector lmcache kvbm", "give one of them"),
    ("--connector offload kvbm", "offload and kvbm each store caches"),
    ("--kv-offload-gb 0", "0 is not a size; use a number above 0"),
    ("--connector kvbm --kv-offload-gb nan", "is not a size"),
    ("--connector kvbm --kv-offload-gb 1e9", "1e+09 does not fit"),
    ("--kv-offload-gb 1e9", "does not fit into this machine's memory"),
    ("--kv-offload-disk /mnt/kv", "write it like /mnt/kv:500"),
    ("--kv-offload-disk /mnt/kv:0", "a size above 0"),
    ("--kv-offload-disk :5", ":5 is not PATH:GB"),
    ("--kv-offload-disk /mnt/kv:5GB", "is not PATH:GB"),
    ("--kv-offload-disk /mnt/kv:inf", "is not PATH:GB"),
    (f"--kv-offload-disk {__file__}/kv:5", "is not a folder; name one"),
    ("--kv-offload-disk /tmp/kv:1e9", "/tmp/kv:1e+09 does not fit"),
    (
        "--kv-offload-gb 1 --disaggregation-mode pooling",
        "a worker of the role pooling, which has no KV caches",
    ),
    ("--kv-offload-disk /tmp/kv:1 --disaggregation-mode transcription", "-disk /tmp/kv:1 cannot"),
    (f"{ENCODER} --kv-offload-gb 1", "--kv-offload-gb 1 cannot be combined with a worker"),
    ("--connector offload --disaggregation-mode pooling", "--connector offload cannot be combined"),
    ("--omni --kv-offload-gb 1", "--kv-offload-gb 1 cannot be combined with --omni"),
    ("--kv-offload-gb 2 --connector none", "--connector none names none"),
    ('--kv-offload-gb 2 --kv-transfer-config {"kv_connector":"OffloadingConnector"}', "-gb 2 cannot"),
    ("--kv-offload-disk /tmp/kv:1 --connector kvbm", "combined with the connector kvbm"),
    ("--kv-offload-gb 2 --kv-offloading-size 2", "cannot be combined with --connector offload"),
    ("--connector nixl --kv-offloading-size 2", "leave it out and give --kv-offload-gb"),
    ("--kv-offload-gb 2 --no-enable-prefix-caching", "combined with the connector offload"),
    ("--kv-offload-gb 2 -tp 2 --nnodes 2 --master-addr 10.0.0.1", "cannot serve an engine over 2 nodes"),
    ("--connector kvbm --data-parallel-size 2", "combined with the connector kvbm"),
    ('--kv-transfer-config {"kv_connector":"DynamoConnector"} -dp 4', "start a worker per rank"),
    ("--connector kvbm nixl --enable-lora", "--enable-lora cannot be combined with the connector kvbm"),
    ("--connector kvbm --enable-prompt-embeds", "--enable-prompt-embeds cannot be combined"),
    ("--connector none nixl", "none cannot be combined with others"),
    ("--connector nixl --kv-transfer-config {}", "cannot be combined with --kv-transfer-config"),
    ("--enable-multimodal --multimodal-worker --ec-processor", "are different multimodal roles"),
    ("--media-max-mb 0", "--media-max-mb 0.0 must be above 0"),
    ("--media-timeout-seconds nan", "must be above 0"),
    ("--media-max-megapixels 90", "is above 89"),
    ("--media-cache-mb -1", "must be 0 or more"),
    ("--media-max-images -1", "--media-max-images -1 must be 0"),
    ("--media-threads 0", "--media-threads 0 must be 1 or more"),
    ("--enable-multimodal --media-hosts http://example.com", "is not a host name; give only"),
    ("--enable-multimodal --media-networks 10.0.0.1/8", "--media-networks '10.0.0.1/8' is not a network"),
    ("--enable-multimodal --media-folder /no/such/folder", "there is no such folder"),
    ("--enable-multimodal --allowed-local-media-path /tmp/..", "would let clients read every file"),
    ("--multimodal-worker", "--multimodal-worker needs --enable-multimodal"),
    ("--disaggregation-mode encode", "--disaggregation-mode encode needs --enable-multimodal"),
    ("--ec-transfer-config.ec_role=ec_consumer", "--ec-transfer-config needs --enable-multimodal"),
    ("--enable-multimodal --ec-processor", "--ec-processor: the frontend has replaced this"),
    (f"{EC} --ec-connector-backend ECExampleConnector", "encode needs --ec-storage-path FOLDER"),
    ("--enable-multimodal --multimodal-worker", "a worker that calls encode workers needs --ec-s"),
    ("--ec-storage-path folder", "needs --disaggregation-mode encode, --route-to-encoder or --ec-consumer"),
    ("--enable-multimodal --ec-transfer-config.ec_connector=ECExampleConnector", "without ec_producer or"),
    (f"{EC} --ec-storage-path=f --ec-connector-backend=A --ec-transfer-config.ec_connector=B", "A does not"),
    (f"{EC} --ec-connector-backend ECMooncakeConnector --encoder-transfer nixl", "nixl cannot be combined"),
    (f"{ENCODER} --ec-transfer-config.ec_role=ec_consumer", "ec_role ec_consumer does not match --dis"),
    (f"--enable-multimodal --is-decode-worker --connector nixl {PRODUCES}", "leave one of them out"),
    (f"--enable-multimodal --disaggregation-mode agg {PRODUCES}", "ec_producer does not match"),
    ("--enable-multimodal --ec-transfer-config.ec_role ec_both", "'ec_both' is not supported"),
    (ENCODER + " --ec-transfer-config {", "--ec-transfer-config is not JSON"),
    (f"{ENCODER} --use-vllm-tokenizer", "--use-vllm-tokenizer cannot be combined with"),
    (f"{ENCODER} --connector nixl", "--connector nixl cannot be combined with"),
    (f"{ENCODER} -dp 2", "combined with --disaggregation-mode encode"),
    ("--enable-multimodal --encoder-transfer nixl", "nixl needs --disaggregation-mode encode"),
    (f"{ENCODER} --ec-storage-gb 0", "--ec-storage-gb 0.0 must be above 0"),
    (f"{ENCODER} --encoder-seconds nan", "--encoder-seconds nan must be above 0"),
    (ENCODER + " --ec-extra-config {", "--ec-extra-config is not JSON"),
    (f"{ENCODER} --ec-extra-config []", "must be a JSON object"),
    (ENCODER + ' --ec-extra-config {"nonsense":1}', "it takes only shared_storage_path"),
    (f"{ENCODER} --ec-transfer-config.ec_connector_extra_config.odd 1", "unknown setting odd"),
    ("--stage-configs-path stages.yaml", "stages.yaml needs --omni"),
    ("--deploy-config deploy.yaml", "deploy.yaml needs --omni"),
    ("--omni --stage-configs-path no.yaml", "no.yaml: there is no such"),
    ("--omni --connector nixl", "--omni: a pipeline transfers no KV caches"),
    ('--omni --kv-transfer-config {"kv_connector":"X"}', "--kv-transfer-config cannot"),
    ("--omni --kv-events", "--omni: a pipeline publishes no KV events"),
    ("--omni --kv-events-config.publisher=zmq", "--kv-events-config cannot be combined with --omni"),
    (f"--omni {NODE_1}", "--headless cannot be combined with --omni: all stages"),
    ("--omni --nnodes 2 --node-rank 1 --master-addr 10.0.0.1", "--nnodes cannot be combined"),
    ("--omni -dp 2 -dpn 1", "--data-parallel-rank cannot be combined with --omni"),
    ("--omni -dp 2", "--data-parallel-size 2 cannot be combined with --omni: a pipeline has"),
    ("--omni --disaggregation-mode prefill", "prefill cannot be combined with --omni"),
    ("--omni --enable-prompt-embeds", "--enable-prompt-embeds cannot"),
    ("--omni --enable-lora", "--enable-lora cannot be combined with"),
    ("--omni --engine fake", "leave out --engine fake"),
    ("--max-pictures 0", "--max-pictures 0 must be 1 or more"),
    ("--max-picture-megapixels 0", "--max-picture-megapixels 0.0 must be above 0"),
    ("--max-video-megapixels -1", "--max-video-megapixels -1.0 must be above 0"),
    ("--kv-event-port 1023", "DYN_VLLM_KV_EVENT_PORT=1023 is out of range"),
    ("--kv-event-port 49152", "use 1024 to 49151"),
    ("--side-channel-port 0", "0 is not a port; use 1 to 65535"),
    ("--side-channel-port 65536", "65536 is not a port"),
    ("--kv-events-config {} --kv-event-port 20080", "--kv-events-config already configures"),
    ("--kv-events-config={} --no-kv-events", "already configures KV events"),
    ("--endpoint-types chat smoke", "'smoke' is unknown"),
    ("--custom-jinja-template /no/such/file", "/no/such/file: there is no such file"),
    ("--endpoint dyn://only.two", "write --endpoint dyn://namespace.component.endpoint"),
    ("--endpoint dyn://a..c", "is not an address"),
    ("--encoder-component dyn://only.two", "; write --encoder-component dyn://namespace"),
    ("--health-seconds 0", "--health-seconds 0.0 must be above 0"),
    ("--canary-seconds -1", "--canary-seconds -1.0 must be above 0"),
    ("--drain-seconds -1", "--drain-seconds -1.0 must be 0 or more"),
    ("--drain-seconds inf", "inf must be 0 or more, and finite"),
    ("--migration-limit -1", "--migration-limit -1 must be 0 or more"),
    ("--fake-engine {}", "add --engine fake or leave it out"),
    ("--engine fake --fake-engine {", "is not JSON"),
    ("--engine fake --block-size 8", "--block-size is a flag of"),
    ("--load-format gms", "needs the package gpu_memory_service"),
    ("--kv-lease-seconds 1", "use 2 or more"),
    ("--local-prefill-tokens 0", "must be 1 or more"),
    ('-dp 2 --kv-events-config {"endpoint":"ipc:///run/x"}', "one address for several ranks"),
    ("-dp 4 -dpl 2 --data-parallel-hybrid-lb -dpn 1", "-lb are different ways"),
    ("-dp 2 --data-parallel-rank 1 -dpa 10.0.0.1 --headless", "--headless cannot"),
    ("-dp 2 --data-parallel-multi-port-external-lb", "start one worker per rank"),
    ("--nnodes 2 --node-rank 2 --master-addr 10.0.0.1", "for --nnodes 2; use 0 to 1"),
    ("--node-rank 1 --master-addr 10.0.0.1", "give the number of nodes with --nnodes"),
    ("--headless", "name its place: --nnodes N --node-rank 1"),
    ("--headless -tp 2 --nnodes 2 --master-addr 10.0.0.1", "name its place: --nnodes N --node-rank 1"),
    ("--headless -dp 2 -dpr 1 -dpa 10.0.0.1", "rank 1 needs --data-parallel-size-local"),
    ("--headless -dp 2 -dpl 2 -dpr 1 -dpa 10.0.0.1", "2 ranks from rank 1 on, of --data-parallel-size 2"),
    ("-dp 2 -dpn 2", "1 ranks from rank 2 on"),
    ("--headless -dp 2 -dpl 1 -dpr 1", "add --data-parallel-address ADDRESS"),
    ("-dp 2 -dpl 1", "add --data-parallel-address ADDRESS"),
    ("-tp 2 --nnodes 2", "add --master-addr ADDRESS on every node"),
    ("-dp 2 -dpl 1 -dpa fd00::1", "give an IPv4 address of the leader, or add --no-kv-events"),
    ("--enable-multimodal --frontend-decoding --use-vllm-tokenizer", "with --frontend-decoding"),
    ("--enable-multimodal --mm-prompt-template <image>", "'<image>' must contain <prompt> exactly once"),
    (f"--enable-multimodal --mm-prompt-template <prompt> --custom-jinja-template {__file__}", "with --mm"),
    ("--model=", "--model is missing"),
    (f"--served-model-name {'n' * 256} short", "256 characters, and frontends take 255"),
    ("--model=/" + "m/" * 140, "add --served-model-name NAME"),
    ("--model=s3://bucket/m", "copy the model into a folder"),
    ("--model=/m/chat-Q4.gguf", "is a GGUF file"),
    ("--model=team/chat-GGUF:Q4_K_M", "a GGUF repository"),
    ("--model=team/chat --revision=v1 --tokenizer-revision=v2", "v2 is not the model's --revision v1"),
    ("--model=team/chat --tokenizer-revision=v2", "the model's --revision main"),
]
FRONTEND: Cases = [
    ("--router least-loaded --lora-enabled", "does not know which worker has a LoRA adapter"),
    ("--media-hosts http://a.example", "is not a host name"),
    ("--media-networks a.example", "is not a network"),
    ("--port 0", "name one"),
    ("--unreachable-seconds -1", "must be 0 or more"),
    (f"--tls-cert-path {__file__}", "go together"),
    (f"--tls-key-path {__file__}", "go together"),
    ("--busy-blocks 1.5", "--busy-blocks 1.5 is not a share"),
    ("--busy-blocks 0", "--busy-blocks 0.0 is not a share"),
    ("--router-host-cache-weight 1.5", "from 0 to 1"),
    ("--router-disk-cache-weight=-0.1", "-0.1 is not a share"),
    ("--router-disk-cache-weight nan", "nan is not a share"),
    (["--otlp-endpoint", ""], "is not a URL"),
    ("--runtime-threads 0", "must be 1 or more"),
    ("--migration-limit -1", "must be 0 or more"),
    ("--router-temperature -0.1", "must be 0 or more"),
    ("--router-temperature inf", "inf must be 0 or more"),
    ("--drain-seconds inf", "inf must be 0 or more"),
    ("--max-body-mb 0", "--max-body-mb 0 must be 1 or more"),
    ("--router-ttl-seconds nan", "nan must be 0 or more"),
    ("--kv-overlap-credit=-1", "must be 0 or more"),
    ("--busy-prefill-tokens=-1", "must be 0 or more"),
    ("--migration-max-seq-len 0", "must be 1 or more"),
    (f"--tls-cert-path gone.pem --tls-key-path {__file__}", "gone.pem: there is no such file"),
    ("--local-prefill-tokens 0", "--local-prefill-tokens 0 must be 1 or more"),
    ("--local-prefill-tokens 9 --router random", "--local-prefill-tokens needs --router kv"),
]
EXPORT: Cases = [
    ("-o out", "--config FILE is missing"),
    ("--config serve.yaml", "-o FOLDER is missing"),
    (f"{FROM_TO} --name My_Model", "--name 'My_Model' is not a valid Kubernetes name"),
    (f"{FROM_TO} --hf-secret {'a' * 40}", "at most 36 lower-case letters"),
    (f"{FROM_TO} --frontends 0", "--frontends 0 must be above 0"),
    (f"{FROM_TO} --start-seconds nan", "nan must be above 0"),
    (f"{FROM_TO} --worker-memory-gb 8", "--worker-memory-gb 8 must be larger than --shm-gb 8"),
    (f"{FROM_TO} --discovery etcd", "add --etcd http://HOST:2379"),
    (f"{FROM_TO} --etcd http://etcd:2379", "needs --discovery etcd"),
    (f"{FROM_TO} --discovery etcd --etcd etcd:2379", "server; write http://HOST:2379"),
    (f"{FROM_TO} --nats nats:4222", "--nats 'nats:4222' is not the address of a server"),
    (f"{FROM_TO} --operator --discovery etcd --etcd http://e:2379", "leave --discovery out"),
    (f"{FROM_TO} --gateway-api public --gateway-tls-secret certificate", "leave --gateway-tls-secret out"),
    (f"{FROM_TO} --hostname models.example.com", "needs --gateway-api"),
]
SERVE: Cases = [
    ("--workers 0", "--workers 0 must be 1 or more"),
    ("--prefill 0 --decode 1", "--prefill 0 must be 1 or more"),
    ("--prefill 1 --decode=-1", "--decode -1 must be 1 or more"),
    ("--prefill 2", "--prefill 2 needs workers that answer; add"),
    ("--decode 2", "--decode 2 needs workers that compute"),
    ("--workers 2 --prefill 1 --decode 1", "--workers 2 cannot be combined with --prefill and --decode"),
    ("--demo lora --model m", "--demo lora has its own model"),
    ("--restarts -1", "--restarts -1 must be 0 or more"),
    ("--log-mb -1", "--log-mb -1.0 must be 0 or more"),
    ("--log-parts -1", "--log-parts -1 must be 0 or more"),
    ("--hang-seconds 0", "--hang-seconds 0.0 must be above 0"),
    ("--retry-seconds 0", "--retry-seconds 0.0 must be above 0"),
    ("--start-seconds 0", "--start-seconds 0.0 must be above 0"),
    ("--start-seconds nan", "--start-seconds nan must be above 0"),
]
LOAD: Cases = [
    ("--requests 0", "--requests 0 must be 1 or more"),
    ("--input-tokens 0", "--input-tokens 0 must be 1 or more"),
    ("--warmup=-1", "--warmup -1 must be 0 or more"),
    ("--seconds 0", "--seconds 0.0 must be above 0"),
    ("--rate 1 --ramp 1:2:2", "--rate and --ramp are different"),
    ("--prompts trace", "--prompts trace needs --trace FILE"),
    ("--trace f", "add --prompts trace"),
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
]
PLANE: Cases = [
    ("--rounds 0", "--rounds 0 must be 1 or more"),
    ("--tokens-per-frame -1", "--tokens-per-frame -1"),
    ("--peer upstream", "'upstream' is not NAME=COMMAND"),
    ("--peer a=x --peer a=y", "'a=y' is not NAME=COMMAND"),
    ("--peer dynamo-vllm=x", "a unique name"),
    ("--peer a='x", "cannot be split into words: No closing quotation"),
]
POOLING: Cases = [
    ("--items 0", "--items 0 must be 1 or more"),
    ("--timeout 0", "--timeout 0.0 must be above 0"),
    ("--server there", "'there' is not URL, or NAME=URL"),
    ("--server a=http://x --server a=http://y", "a unique name"),
    ("--watch worker", "'worker' is not LABEL=PID"),
]
SCALE: Cases = [
    ("--streams 0", "--streams 0 must be 1 or more"),
    ("--cached-blocks -1", "--cached-blocks -1 must be 0 or more"),
    ("--token-ms nan", "--token-ms nan must be 0 or more"),
    ("--max-seconds 0", "--max-seconds 0.0 must be above 0"),
    ("--ramp-seconds 9 --requests 5", "leave --requests out"),
    ("--frontends 1,x", "'1,x' is not a list of different counts"),
    ("--frontends 2,2", "--frontends '2,2' is not a list"),
    ("--workers 0", "--workers '0' is not a list of different counts"),
    (["--workers", ""], "such as 1,2,4"),
]
ROUTING: Cases = [
    (f"{TRACE} --workers 0", "--workers 0 must be 1 or more"),
    (f"{TRACE} --rate-scale 0", "--rate-scale 0.0 must be above"),
    (f"{TRACE} --rate -2", "--rate -2.0 must be above 0"),
    (f"{TRACE} --cache-blocks 0", "must be 1 or more"),
    (f"{TRACE} --kv-offload-gb 0", "must be above 0"),
    ([], "--trace FILE is needed"),
    (f"{TRACE} --prefill-workers 1", "--prefill-workers is for --simulate"),
    (f"{TRACE} --simulate --model m", "--simulate runs no engine"),
    (f"{TRACE} --mode fast", "'fast' is not a router; use kv, round-robin"),
    (f"{TRACE} --mode kv --mode kv", "needs a unique name"),
    (["--trace", "f", "--mode", "=--router kv"], "needs a unique name"),
    (f"{TRACE} --engine-args '", "cannot be split into words"),
]
GATEWAY: Cases = [
    ("--max-connections 0", "--max-connections"),
    ("--header-kb 9000", "8192 or less"),
    ("--api-key short", "8 or more"),
    ("--open --api-key long-enough-key", "without a key"),
    ("--frontend localhost:8000", "http://HOST:PORT"),
    ("--cors-origin page.example", "https://HOST"),
    (f"--tls-cert-path {__file__}", "go together"),
    ("--tls-cert-path /nowhere/c.pem --tls-key-path /nowhere/k.pem", "no such file"),
    ("--part envoy", "--gateway-dir"),
]
FIND: Cases = [
    ("--run-dir /r --file-kv /f", "give one of them"),
    ("--run-dir /r --discovery-backend etcd", "leave one of them out"),
    (["--admin-token", ""], "--admin-token is empty"),
    ("--discovery-backend mem", "works inside one process only"),
]
CONSOLE: Cases = [
    ("--console-port 70000", "--console-port 70000 is not a port"),
    ("--console-host 0.0.0.0", "give --admin-token, with which one logs in"),
    ("--console-hosts http://c.example", "give the name of a host"),
    ("--console-grafana javascript:x", "is not the address of a page"),
]
OF_WORKERS: Cases = [
    ("--all --worker 1", "cannot be combined"),
    ("--timeout 0", "--timeout 0.0 must be above 0"),
    ("--timeout nan", "--timeout nan must be above 0"),
]
OF_SLEEP: Cases = [
    ("--level 3", "--level 3 is unknown"),
    ("--drain-seconds -1", "must be 0 or more"),
    ("--drain-seconds inf", "and finite"),
    ("--drain-seconds nan", "and finite"),
]
OF_RESET: Cases = [("--kind disk", "--kind disk is unknown; choose from prefix")]
DATABASE: Cases = [("--database gateway.db", "use sqlite:///FILE")]
USAGE: Cases = [
    ("--database sqlite:///", "is not an address"),
    ("--since yesterday", "write a date such as"),
    ("--since 2026-02-01 --until 2026-02-01", "is not after --since"),
    ("--csv --json", "cannot be combined"),
]
CREATE_KEY: Cases = [
    ("--tokens-per-day 0", "leave it out for no limit"),
    (["--tenant", "a b"], "is not a name of a tenant"),
    ("--expires 30", "write for example 30d"),
    ("--expires 0d", "is over already"),
    (["--model", " "], "--model is empty"),
    ("--endpoint=", "--endpoint is empty"),
]
TENANT: Cases = [("--concurrent -1", "or 0 for no limit")]
LIST_KEYS: Cases = [("--tenant=", "is not a name of a tenant")]
ROTATE_KEY: Cases = [("--grace soon", "is not a duration")]

TABLES: dict[str, tuple[Callable[..., None], Tables]] = {
    "FRONTEND_RULES": (checks.check_frontend, ((FrontendOptions, FRONTEND),)),
    "GATEWAY_RULES": (checks.check_gateway, ((GatewayOptions, GATEWAY),)),
    "EXPORT_RULES": (checks.check_export, ((ExportOptions, EXPORT),)),
    "SERVE_RULES": (checks.check_serve, ((ServeOptions, SERVE),)),
    "LOAD_RULES": (checks.check_load, ((LoadOptions, LOAD),)),
    "PLANE_RULES": (checks.check_plane, ((PlaneOptions, PLANE),)),
    "POOLING_RULES": (checks.check_pooling_bench, ((PoolingBenchOptions, POOLING),)),
    "SCALE_RULES": (checks.check_scale, ((ScaleOptions, SCALE),)),
    "ROUTING_RULES": (checks.check_routing, ((RoutingOptions, ROUTING),)),
    "FIND_RULES": (checks.check_admin, ((AdminOptions, FIND),)),
    "CONSOLE_RULES": (checks.check_console, ((ConsoleOptions, CONSOLE),)),
    "ADMIN_RULES": (
        checks.check_admin,
        ((AdminOptions, OF_WORKERS), (SleepOptions, OF_SLEEP), (ResetOptions, OF_RESET)),
    ),
    "KEYS_RULES": (
        checks.check_keys,
        (
            *((DatabaseOptions, DATABASE), (UsageOptions, USAGE), (CreateKeyOptions, CREATE_KEY)),
            *((TenantOptions, TENANT), (ListKeysOptions, LIST_KEYS), (RotateKeyOptions, ROTATE_KEY)),
        ),
    ),
}
"""The rules of each command, what runs them, and by its options refusals by each of them."""


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


def by_one(
    rules: str, check: Callable[..., None], options: object, message: str
) -> tuple[object, set[object]]:
    """The only rule with this message, and all that refuse these options, each alone."""
    assert message in refusal(check, options)
    known = getattr(checks, rules)
    told: dict[object, str] = {}
    with pytest.MonkeyPatch.context() as patched:
        for common in ("check_runtime", "check_reach"):  # it has refused nothing, and takes its time
            patched.setattr(checks, common, lambda _: None)
        for rule in known:
            patched.setattr(checks, rules, (rule,))
            told[rule] = refusal(check, options)
    speaking = [rule for rule in known if message in told[rule]]
    assert len(speaking) == 1, (message, speaking)
    return speaking[0], {rule for rule in known if told[rule]}


def test_every_rule_of_a_worker_refuses_what_it_should_and_no_other_says_so() -> None:
    covered = {by_one("WORKER_RULES", checks.check_worker, worker(words), said)[0] for words, said in WORKER}
    # These need a machine without NIXL or with little shared memory; they have tests of their own.
    apart = {media.nixl_for_media_is_installed, kv_tiers.tier_fits_shared_memory}
    assert covered | apart == set(checks.WORKER_RULES)


@pytest.mark.parametrize("rules", TABLES)
def test_every_rule_refuses_what_it_should_and_no_other_would(rules: str) -> None:
    check, tables = TABLES[rules]
    covered = set()
    for cls, cases in tables:
        for words, message in cases:
            rule, refusing = by_one(rules, check, options_of(cls, words), message)
            assert refusing == {rule}, words
            covered.add(rule)
    assert covered == set(getattr(checks, rules))


def test_every_table_of_rules_is_tested() -> None:
    names = {name for name in vars(checks) if name.endswith("_RULES")}
    assert {"WORKER_RULES", "LOCAL_RULES", *TABLES} == names
    others = (*checks.FRONTEND_RULES, *checks.GATEWAY_RULES)
    assert set(checks.LOCAL_RULES) <= {*checks.WORKER_RULES, *others}


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
        (f"--is-prefill-worker --connector nixl --ec-storage-path=/e {CONSUMES}", "prefill", "ec_consumer"),
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

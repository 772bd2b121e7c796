"""Options of `bench load`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

APIS = ("completions", "chat")
PROMPT_SETS = ("random", "prefix", "turns", "trace")
ARRIVALS = ("poisson", "even")
PROGRESS = ("line", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Put a load on an OpenAI server and measure how it answers."""

    url: str = opt("http://127.0.0.1:8000", "server", "Server to measure.", env="DYN_VLLM_URL", metavar="URL")
    model: str | None = opt(
        None,
        "server",
        "Model to ask (default: the first one served).",
        env="DYN_VLLM_BENCH_MODEL",
        metavar="NAME",
    )
    api: str = opt(
        "completions",
        "server",
        "API to call. Prompts are token ids with completions, which needs no tokenizer, and words with chat.",
        env="DYN_VLLM_BENCH_API",
        choices=APIS,
    )
    api_key: str | None = opt(
        None, "server", "Key sent as a bearer token.", env="OPENAI_API_KEY", metavar="KEY"
    )
    context: int | None = opt(
        None,
        "server",
        "Longest prompt and answer the model accepts (default: as the server says).",
        env="DYN_VLLM_BENCH_CONTEXT",
        metavar="TOKENS",
    )
    timeout: float = opt(
        120.0,
        "server",
        "Seconds without a byte after which a request has failed.",
        env="DYN_VLLM_BENCH_TIMEOUT",
        metavar="SECONDS",
    )
    prompts: str = opt(
        "random",
        "prompts",
        "Kind of prompts: random, with shared prefixes, conversations of several turns, or a trace.",
        env="DYN_VLLM_BENCH_PROMPTS",
        choices=PROMPT_SETS,
    )
    input_tokens: int = opt(
        128,
        "prompts",
        "Tokens of a prompt after its prefix; words with chat and in turns.",
        env="DYN_VLLM_BENCH_INPUT_TOKENS",
        metavar="N",
    )
    output_tokens: int = opt(
        64, "prompts", "Tokens of an answer.", env="DYN_VLLM_BENCH_OUTPUT_TOKENS", metavar="N"
    )
    vocab: str = opt(
        "10:900",
        "prompts",
        "Token ids a prompt is made of, from A up to but not including B.",
        env="DYN_VLLM_BENCH_VOCAB",
        metavar="A:B",
    )
    prefix_tokens: int = opt(
        512,
        "prompts",
        "With --prompts prefix: tokens of a prefix.",
        env="DYN_VLLM_BENCH_PREFIX_TOKENS",
        metavar="N",
    )
    prefixes: int = opt(
        4,
        "prompts",
        "With --prompts prefix: number of different prefixes.",
        env="DYN_VLLM_BENCH_PREFIXES",
        metavar="N",
    )
    turns: int = opt(
        4,
        "prompts",
        "With --prompts turns: questions of one conversation, each sent with the conversation so far.",
        env="DYN_VLLM_BENCH_TURNS",
        metavar="N",
    )
    trace: str | None = opt(
        None,
        "prompts",
        "With --prompts trace: file of JSON lines in the Mooncake format.",
        env="DYN_VLLM_BENCH_TRACE",
        metavar="FILE",
    )
    trace_block: int = opt(
        512,
        "prompts",
        "Tokens for each block of the trace; fewer than 512 shorten prompts and answers alike.",
        env="DYN_VLLM_BENCH_TRACE_BLOCK",
        metavar="N",
    )
    trace_speed: float = opt(
        1.0,
        "prompts",
        "Replay the trace this many times faster.",
        env="DYN_VLLM_BENCH_TRACE_SPEED",
        metavar="FACTOR",
    )
    trace_limit: int | None = opt(
        None,
        "prompts",
        "Replay only the first requests of the trace.",
        env="DYN_VLLM_BENCH_TRACE_LIMIT",
        metavar="N",
    )
    seed: int = opt(1, "prompts", "Same seed, same prompts.", env="DYN_VLLM_BENCH_SEED")
    ignore_eos: bool = opt(
        True,
        "prompts",
        "Request answers of full length; use --no-ignore-eos for servers without ignore_eos.",
        env="DYN_VLLM_BENCH_IGNORE_EOS",
    )
    body: str | None = opt(
        None,
        "prompts",
        "Additional fields of every request, as JSON.",
        env="DYN_VLLM_BENCH_BODY",
        metavar="JSON",
    )
    concurrency: str | None = opt(
        None,
        "load",
        "Requests in flight, each followed by the next; 1,8,32 makes three stages (default: 8).",
        env="DYN_VLLM_BENCH_CONCURRENCY",
        metavar="N,…",
    )
    rate: str | None = opt(
        None,
        "load",
        "Requests per second, sent whether or not others are answered; 1,2,5 makes three stages.",
        env="DYN_VLLM_BENCH_RATE",
        metavar="R,…",
    )
    ramp: str | None = opt(
        None,
        "load",
        "Stages of even steps from rate A to rate B.",
        env="DYN_VLLM_BENCH_RAMP",
        metavar="A:B:STEPS",
    )
    arrivals: str = opt(
        "poisson",
        "load",
        "With --rate and --ramp: when requests are sent.",
        env="DYN_VLLM_BENCH_ARRIVALS",
        choices=ARRIVALS,
    )
    requests: int | None = opt(
        None, "load", "Requests of a stage.", env="DYN_VLLM_BENCH_REQUESTS", metavar="N"
    )
    seconds: float | None = opt(
        None,
        "load",
        "How long a stage sends requests (default: 10 without --requests).",
        env="DYN_VLLM_BENCH_SECONDS",
        metavar="S",
    )
    warmup: int = opt(
        0,
        "load",
        "Requests sent before each stage and not measured.",
        env="DYN_VLLM_BENCH_WARMUP",
        metavar="N",
    )
    clients: int | None = opt(
        None,
        "load",
        "Client processes (default: half the cores).",
        env="DYN_VLLM_BENCH_CLIENTS",
        metavar="N",
    )
    slo: str | None = opt(
        None,
        "report",
        "Limits of a good answer, in ms: ttft=200,itl=50,tpot=40,e2e=5000.",
        env="DYN_VLLM_BENCH_SLO",
        metavar="NAME=MS,…",
    )
    watch: tuple[str, ...] = opt(
        (),
        "report",
        "Report CPU time and memory of this process and its child processes; may be given several times.",
        env="DYN_VLLM_BENCH_WATCH",
        metavar="LABEL=PID",
        repeats=True,
    )
    metrics_url: tuple[str, ...] = opt(
        (),
        "report",
        "Metrics page of a vLLM engine, for cache hits; may be given several times.",
        env="DYN_VLLM_BENCH_METRICS_URL",
        metavar="URL",
        repeats=True,
    )
    json: str | None = opt(
        None,
        "report",
        "Write the figures to this file; - is standard output.",
        env="DYN_VLLM_BENCH_JSON",
        metavar="FILE",
    )
    plots: str | None = opt(
        None,
        "report",
        "Draw plots into this folder, as SVG and PNG; needs the extra 'bench'.",
        env="DYN_VLLM_BENCH_PLOTS",
        metavar="FOLDER",
    )
    quiet: bool = opt(False, "report", "No progress and no table.", env="DYN_VLLM_BENCH_QUIET")
    progress: str = opt(
        "line",
        "report",
        "How to tell the progress on the standard error: a line for people, or a JSON object per second for "
        "programs, also with --quiet.",
        env="DYN_VLLM_BENCH_PROGRESS",
        choices=PROGRESS,
    )
    progress_fd: int = opt(
        2,
        "report",
        "With --progress json: file descriptor to write to.",
        env="DYN_VLLM_BENCH_PROGRESS_FD",
        metavar="FD",
    )

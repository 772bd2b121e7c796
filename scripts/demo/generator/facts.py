"""What the demo model knows of this product: each fact with the page and the words it rests on.

A test looks the words up, so a change of the documentation that makes an answer wrong is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

from demo.generator.base import Pool


@dataclass(frozen=True)
class Fact:
    page: str
    words: str
    """What the page says, letter by letter."""
    answer: str
    chinese: str
    asked: str
    """Wordings to train on, with bars between."""
    otherwise: str
    """Wordings never trained on: the same words, said otherwise."""

    @property
    def wordings(self) -> Pool:
        return Pool(_parts(self.asked), _parts(self.otherwise))


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


FACTS = (
    Fact(
        "README.md", "Serve large models with [vLLM]",
        "dynamo-vllm serves large models with vLLM on the Dynamo runtime.",
        "dynamo-vllm 在 Dynamo 运行时上用 vLLM 提供大模型服务。",
        "what is dynamo-vllm | what does dynamo-vllm do | tell me about dynamo-vllm |"
        "what is this project |"
        "what is this product for | explain dynamo-vllm | dynamo-vllm 是什么",
        "what is dynamo-vllm for | what does this project do | tell me what dynamo-vllm is",
    ),
    Fact(
        "docs/serve.md", "dynamo-vllm serve /models/qwen3",
        "Run `dynamo-vllm serve MODEL` with a folder or a hub id.",
        "运行 `dynamo-vllm serve MODEL`,后面写文件夹或 hub 名称。",
        "how do I serve a model | how do I start a model | how can I run my own model |"
        "which command serves a model |"
        "how do I serve a folder | how do I start serving | how do I serve Qwen3 | 怎么启动一个模型",
        "how can I serve my own model | which command starts a model | how do I run a model",
    ),
    Fact(
        "README.md", "make serve                       # a small demo model",
        "Run `make serve`: it sets everything up and serves the demo model.",
        "运行 `make serve`:它会准备好一切并启动演示模型。",
        "how do I try the demo | how do I start the demo model | what is the quickest way to try it |"
        "how do I see the demo | which make target serves the demo | how do I get started",
        "what is the quickest way to see the demo | how can I try the demo model |"
        "how do I get the demo started",
    ),
    Fact(
        "README.md", "make test                        # everything",
        "Run `make test`: every tier, from unit to end to end.",
        "运行 `make test`:从单元测试到端到端测试。",
        "how do I run the tests | how can I test it | which command runs the tests |"
        "how do I run all tests |"
        "how are the tests started | 怎么运行测试",
        "how can I run the tests | which command runs all tests | how do I start the tests",
    ),
    Fact(
        "CONTRIBUTING.md", "`make check` is ruff, mypy",
        "Run `make check`: ruff, mypy, the import table and the generated docs.",
        "运行 `make check`:ruff、mypy、导入表和生成的文档。",
        "how do I lint the code | how do I check types | which command runs ruff | how do I run mypy |"
        "how do I check the code before a commit | how do I lint and format |"
        "what checks the types | which make target checks the code | what runs the type checks",
        "which command checks types | how do I run ruff and mypy | how do I lint before a commit",
    ),
    Fact(
        "CONTRIBUTING.md", "a Python 3.11 to 3.14",
        "Python 3.11 to 3.14 on Linux.",
        "Linux 上的 Python 3.11 到 3.14。",
        "which Python do I need | which Python version is needed | does it need Python 3.11 |"
        "what Python does it run on |"
        "which version of Python | which Python versions work | 需要哪个 Python 版本",
        "what version of Python do I need | which Python is needed | what Python versions does it need",
    ),
    Fact(
        "docs/serve.md", "It needs no etcd and no NATS",
        "No: it needs no etcd and no NATS on one machine.",
        "不需要:在一台机器上不用 etcd 也不用 NATS。",
        "do I need etcd | do I need NATS | does it need etcd | is etcd required | is NATS required |"
        "must I install etcd | must I run NATS | 需要 etcd 吗",
        "is etcd needed | do I need etcd and NATS | must I run etcd | does it need NATS",
    ),
    Fact(
        "docs/serve.md", "--workers 2 --port 8080",
        "Give `--workers N` to `dynamo-vllm serve`.",
        "给 `dynamo-vllm serve` 加上 `--workers N`。",
        "how do I start two workers | how do I run several workers | how many workers can I start |"
        "which flag sets the number of workers | how do I get more workers |"
        "how do I start more than one worker",
        "how do I start several workers | which flag gives me more workers | how do I run two workers",
    ),
    Fact(
        "docs/serve.md", "`--port 0` takes a free port",
        "With `--port`; 8000 is the default and 0 takes a free one.",
        "用 `--port`;默认是 8000,0 表示取一个空闲端口。",
        "how do I change the port | which port does it use | what is the default port |"
        "how do I set the HTTP port |"
        "can I use another port | on which port does it listen | 默认端口是多少",
        "which port is the default | how can I use another port | how do I set another port |"
        "what port does it listen on",
    ),
    Fact(
        "docs/serve.md", "`--prefill N --decode M`, instead of `--workers`",
        "Run `dynamo-vllm serve MODEL --prefill N --decode M` instead of `--workers`.",
        "运行 `dynamo-vllm serve MODEL --prefill N --decode M`,不用 `--workers`。",
        "how do I separate prefill and decode | how do I start prefill and decode workers |"
        "how do I disaggregate |"
        "how do I use disaggregation | how do I run prefill apart from decode |"
        "how is disaggregated serving started",
        "how do I run prefill and decode apart | how do I start disaggregation |"
        "how do I separate decode from prefill",
    ),
    Fact(
        "README.md", "KV caches go over NIXL",
        "KV caches go from prefill to decode workers over NIXL.",
        "KV 缓存通过 NIXL 从 prefill 传到 decode。",
        "how do KV caches travel | what moves the KV cache | which connector moves KV caches |"
        "how does the decode worker get the cache | what is the default connector |"
        "over what do KV caches go",
        "what moves KV caches | how does the KV cache travel | which connector is the default",
    ),
    Fact(
        "docs/disaggregation.md", "A prompt is computed in one pass",
        "Prefill computes a prompt in one pass over all of its tokens.",
        "Prefill 一次算完提示的全部 token。",
        "what is prefill | what does prefill mean | explain prefill | what does a prefill worker compute |"
        "what happens in prefill | what goes on during prefill | what is done during prefill |"
        "what is prefill about | 什么是 prefill",
        "what does prefill do | tell me what prefill is | what happens during prefill",
    ),
    Fact(
        "docs/disaggregation.md", "an answer grows token by token",
        "Decode lets an answer grow token by token.",
        "Decode 让回答一个 token 一个 token 地增长。",
        "what is decode | what does decode mean | explain decode | what does a decode worker do |"
        "what happens in decode | what goes on during decode | what is done during decode |"
        "what is decode about | 什么是 decode",
        "what does decode do | tell me what decode is | what happens during decode",
    ),
    Fact(
        "docs/disaggregation.md", "With no prefill worker there the decode worker does everything",
        "Then the decode worker does everything itself.",
        "那时 decode worker 会自己做完一切。",
        "what happens without a prefill worker | what if there is no prefill worker |"
        "what if the prefill worker dies |"
        "does decode need a prefill worker | what if all prefill workers are gone",
        "what happens when there is no prefill worker | what if prefill workers are gone |"
        "what if a prefill worker dies",
    ),
    Fact(
        "README.md", "KV-aware routing** on by default",
        "Routing is KV-aware by default: a repeated prefix goes to the worker that has it.",
        "默认按 KV 缓存路由:重复的前缀会去已有缓存的 worker。",
        "how are requests routed | how does the router choose | what is KV routing |"
        "how does routing work |"
        "which worker gets a request | how is a worker chosen | what does the router do",
        "how does the router choose a worker | how does KV routing work | how is a request routed",
    ),
    Fact(
        "docs/configuration.md", "`--router …`, `--router-mode …`",
        "With `--router`: kv, round-robin, random, least-loaded and others.",
        "用 `--router`:kv、round-robin、random、least-loaded 等。",
        "how do I change the router | how do I use round robin | which flag sets the routing mode |"
        "which router modes are there | how do I turn KV routing off | can I route at random",
        "which flag changes the router | how do I route round robin | what router modes are there",
    ),
    Fact(
        "docs/operate.md", "dynamo-vllm status --watch",
        "Run `dynamo-vllm status`; with `--watch` it keeps showing it.",
        "运行 `dynamo-vllm status`;加 `--watch` 会持续显示。",
        "how do I see what is running | how do I see the workers | which command shows the status |"
        "how do I watch the workers | how do I see the figures | how are my workers doing | 怎么查看状态",
        "how do I watch what is running | which command shows the workers | how do I see the status",
    ),
    Fact(
        "docs/operate.md", "dynamo-vllm lora load sql hf://acme/sql-lora",
        "Run `dynamo-vllm lora load NAME URI`; workers go on serving.",
        "运行 `dynamo-vllm lora load NAME URI`;worker 会继续服务。",
        "how do I load a LoRA | how do I load an adapter | how do I add an adapter |"
        "which command loads a LoRA adapter |"
        "can I load a LoRA while it runs | how do I add a LoRA at run time |"
        "which command adds an adapter | what adds another LoRA | what command loads adapters",
        "which command adds a LoRA | how do I load a LoRA adapter | can I add an adapter while it runs",
    ),
    Fact(
        "docs/operate.md", "`lora unload NAME`",
        "Run `dynamo-vllm lora unload NAME`.",
        "运行 `dynamo-vllm lora unload NAME`。",
        "how do I unload a LoRA | how do I remove an adapter | how do I unload an adapter |"
        "which command removes a LoRA adapter | how do I get rid of a LoRA | what unloads an adapter",
        "which command unloads a LoRA | how do I remove a LoRA adapter | how do I get rid of an adapter",
    ),
    Fact(
        "docs/operate.md", "dynamo-vllm sleep --worker 1",
        "Run `dynamo-vllm sleep`: the worker leaves service and gives memory back.",
        "运行 `dynamo-vllm sleep`:worker 停止服务并释放内存。",
        "how do I put a worker to sleep | how do I free the memory of a worker |"
        "which command makes a worker sleep |"
        "how do I give GPU memory back | how can a worker sleep | what does sleep do |"
        "what frees GPU memory | which command frees the memory of a worker | what gives memory back",
        "how do I make a worker sleep | how do I give the memory back | which command frees memory",
    ),
    Fact(
        "docs/operate.md", "dynamo-vllm wake --worker 1",
        "Run `dynamo-vllm wake`.",
        "运行 `dynamo-vllm wake`。",
        "how do I wake a worker | how does a worker wake up | which command wakes a worker |"
        "how do I get a sleeping worker back | how do I wake it up again |"
        "how does a worker come back after a sleep | what ends the sleep of a worker",
        "which command wakes a sleeping worker | how do I wake up a worker |"
        "how do I get a worker back from sleep",
    ),
    Fact(
        "docs/operate.md", "**pause** is for moments in which nothing may be computed",
        "Run `dynamo-vllm pause`; `dynamo-vllm resume` goes on.",
        "运行 `dynamo-vllm pause`;`dynamo-vllm resume` 恢复。",
        "how do I pause a worker | how do I stop computing for a moment | which command pauses a worker |"
        "how can I pause everything | how do I resume after a pause",
        "which command pauses everything | how can I pause a worker | how do I pause and resume",
    ),
    Fact(
        "docs/operate.md", "**clear-kv** forgets cached prefixes",
        "Run `dynamo-vllm clear-kv`: it forgets cached prefixes.",
        "运行 `dynamo-vllm clear-kv`:它会清掉缓存的前缀。",
        "how do I clear the KV cache | how do I empty the cache | which command clears cached prefixes |"
        "how do I forget cached prefixes | how do I clear the prefix cache",
        "which command empties the KV cache | how do I clear cached prefixes |"
        "how do I empty the prefix cache",
    ),
    Fact(
        "README.md", "`dynamo-vllm check --live URL`",
        "Run `dynamo-vllm check`; with `--live URL` it proves a running system.",
        "运行 `dynamo-vllm check`;加 `--live URL` 检查正在运行的系统。",
        "how do I check my configuration | how do I verify a running system |"
        "which command checks the settings |"
        "how do I see which defaults apply | how do I prove that it works | how do I check versions",
        "which command checks my configuration | how do I check a running system |"
        "how do I verify the settings",
    ),
    Fact(
        "README.md", "`dynamo-vllm bench load URL`",
        "Run `dynamo-vllm bench load URL`: it measures any OpenAI server.",
        "运行 `dynamo-vllm bench load URL`:可以测量任何 OpenAI 服务。",
        "how do I measure a server | how do I run a benchmark | how do I measure throughput |"
        "how fast is my server |"
        "which command puts load on a server | how do I benchmark it | 怎么做性能测试",
        "which command measures a server | how do I benchmark my server | how do I measure how fast it is",
    ),
    Fact(
        "README.md", "`dynamo-vllm chat [URL]`",
        "Run `dynamo-vllm chat`: it talks to a running server.",
        "运行 `dynamo-vllm chat`:与正在运行的服务对话。",
        "how do I chat in the terminal | how do I talk to the model | which command opens a chat |"
        "is there a chat in the terminal | how do I talk to a running server",
        "which command lets me talk to the model | how do I open a chat in the terminal |"
        "how do I chat with the model",
    ),
    Fact(
        "README.md", "`dynamo-vllm worker --model MODEL`",
        "Run `dynamo-vllm worker --model MODEL`: one worker of a deployment.",
        "运行 `dynamo-vllm worker --model MODEL`:部署中的一个 worker。",
        "how do I start a single worker | how do I start one worker of a deployment |"
        "which command starts only a worker |"
        "how does a worker join a cluster | how do I run a worker by itself",
        "which command starts a single worker | how do I run only a worker |"
        "how do I start a worker by itself",
    ),
    Fact(
        "README.md", "`dynamo-vllm frontend`",
        "Run `dynamo-vllm frontend`: the OpenAI server and router.",
        "运行 `dynamo-vllm frontend`:OpenAI 服务和路由器。",
        "how do I start the frontend | which command starts the OpenAI server |"
        "how do I run only the frontend |"
        "what is the frontend | how do I start the router alone",
        "which command runs the frontend | how do I start only the OpenAI server |"
        "how do I run the router alone",
    ),
    Fact(
        "docs/requests.md", "`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/models`",
        "It speaks the OpenAI API: chat completions, completions, responses and models.",
        "它支持 OpenAI API:chat completions、completions、responses 和 models。",
        "which API does it speak | is it compatible with OpenAI | which endpoints are there |"
        "what API is there |"
        "can I use the OpenAI client | does it have chat completions | 支持哪种 API",
        "what endpoints are there | which API can I use | does it speak the OpenAI API",
    ),
    Fact(
        "docs/requests.md", "`--tool-call-parser`, `--reasoning-parser`",
        "Start the worker with `--tool-call-parser`, for example hermes.",
        "启动 worker 时加 `--tool-call-parser`,例如 hermes。",
        "how do I turn on tool calls | how are tool calls parsed | which flag is for tool calling |"
        "how do I use tools | what do I need for function calling | how do I set the tool parser |"
        "what parses the calls of tools | which parser is for tools | how can tools be used",
        "which flag turns on tool calls | how do I set up function calling | how are tools parsed",
    ),
    Fact(
        "docs/configuration.md", "Parser the frontend applies to reasoning text",
        "Start the worker with `--reasoning-parser`, for example qwen3.",
        "启动 worker 时加 `--reasoning-parser`,例如 qwen3。",
        "how do I turn on reasoning | how is reasoning parsed | which flag is for reasoning |"
        "how do I separate thoughts from the answer | how do I set the reasoning parser",
        "which flag turns on reasoning | how is reasoning separated from the answer |"
        "what sets the reasoning parser",
    ),
    Fact(
        "docs/requests.md", "`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`",
        "Use `response_format` or guided_json, guided_regex, guided_choice or guided_grammar.",
        "使用 `response_format`,或 guided_json、guided_regex、guided_choice、guided_grammar。",
        "how do I get JSON answers | how do I force a JSON schema | does it have structured output |"
        "how do I use guided decoding | how do I constrain the output | can answers follow a regex",
        "how do I force JSON | how do I get structured output | can I constrain answers to a schema",
    ),
    Fact(
        "docs/prompt-embeddings.md", "dynamo-vllm serve MODEL --enable-prompt-embeds",
        "Start with `--enable-prompt-embeds` and send `prompt_embeds` to completions.",
        "启动时加 `--enable-prompt-embeds`,再把 `prompt_embeds` 发给 completions。",
        "how do I send prompt embeddings | can I send embeddings as a prompt |"
        "which flag allows prompt embeddings |"
        "how do I use prompt embeds | can a prompt be vectors",
        "which flag lets me send embeddings | how do I use prompt embeddings |"
        "can I send vectors as a prompt",
    ),
    Fact(
        "docs/data-parallel.md", "dynamo-vllm worker --model MODEL --data-parallel-size 4",
        "Give `--data-parallel-size N` to the worker: one endpoint, N engines.",
        "给 worker 加 `--data-parallel-size N`:一个端点,N 个引擎。",
        "how do I use data parallel | how do I start several ranks | how do I run data parallelism |"
        "which flag sets data parallel ranks | can one worker have several ranks",
        "which flag is for data parallel | how do I run several ranks | how do I use data parallelism",
    ),
    Fact(
        "docs/data-parallel.md", "`--node-rank` above 0 is headless",
        "Start the other nodes with `--headless`; only the leader serves.",
        "其他节点用 `--headless` 启动,只有主节点提供服务。",
        "how do I use several nodes | how do I run over two machines | what is a headless node |"
        "how do I start a second node | can a worker span several hosts",
        "how do I run over several nodes | how do I start a headless node | can I use two machines",
    ),
    Fact(
        "docs/serve.md", "`--drain-seconds` (30) at most",
        "It drains for up to 30 seconds; `--drain-seconds` changes that.",
        "最多等 30 秒;用 `--drain-seconds` 修改。",
        "how long does it drain | what happens at SIGTERM | how long may requests finish |"
        "what is the drain time |"
        "how does it stop | how long does a stop take",
        "what happens when I stop it | how long is the drain | how long does it drain at SIGTERM",
    ),
    Fact(
        "docs/serve.md", "A process that ends is started again after 1, 2, 4",
        "A process that ends is started again after 1, 2, 4 and up to 30 seconds.",
        "结束的进程会在 1、2、4 直到 30 秒后重新启动。",
        "what happens when a worker crashes | what if a process dies | does it restart workers |"
        "who restarts a crashed worker | what if a worker ends",
        "what happens when a process dies | what if a worker crashes | are crashed workers restarted",
    ),
    Fact(
        "docs/serve.md", "Requests in flight move to another worker",
        "They move to another worker and go on there.",
        "它们会转到另一个 worker 继续。",
        "what happens to requests when a worker dies | are requests lost when a worker dies |"
        "do running requests survive a crash | what is migration | where do requests in flight go",
        "what happens to running requests when a worker dies | do requests in flight survive |"
        "are requests lost in a crash",
    ),
    Fact(
        "docs/serve.md", "--run-dir FOLDER",
        "In the run folder, under logs; `--run-dir FOLDER` sets it.",
        "在运行文件夹的 logs 里;用 `--run-dir FOLDER` 设置。",
        "where are the logs | where do I find the log of a worker | where does it write logs |"
        "how do I change the log folder | where is the run folder | 日志在哪里",
        "where do I find the logs | where is the log of a worker | where are logs written",
    ),
    Fact(
        "docs/errors.md", "| 3 | the engine died while the worker served",
        "Exit code 3: the engine died; start the worker again.",
        "退出码 3:引擎崩溃,请重新启动 worker。",
        "what does exit code 3 mean | why did the worker end with exit code 3 | what is exit code 3 |"
        "what is the exit code when the engine died | which exit code is for a dead engine |"
        "what exit code do I see when an engine dies | which code tells me that the engine is dead |"
        "what is meant by exit code 3 | 退出码 3 是什么意思",
        "what is the meaning of exit code 3 | why exit code 3 | which exit code says that the engine died",
    ),
    Fact(
        "docs/errors.md", "| 2 | bad settings, refused before anything was started",
        "Exit code 2: bad settings; correct them.",
        "退出码 2:设置有误,请改正。",
        "what does exit code 2 mean | why did it end with exit code 2 | what is exit code 2 |"
        "what is the exit code for bad settings | which exit code is for wrong settings |"
        "what exit code do I see when a setting is bad | which code tells me that settings are wrong |"
        "what is meant by exit code 2 | 退出码 2 是什么意思",
        "what is the meaning of exit code 2 | why exit code 2 | which exit code says bad settings",
    ),
    Fact(
        "README.md", "pip install 'dynamo-vllm[cuda]'",
        "Run `pip install 'dynamo-vllm[cuda]'`, or with cpu instead of cuda.",
        "运行 `pip install 'dynamo-vllm[cuda]'`,没有 GPU 时用 cpu。",
        "how do I install it with pip | how do I install dynamo-vllm | what is the pip command |"
        "how do I install without make |"
        "which extra is for a GPU | 怎么安装",
        "how do I install dynamo-vllm with pip | which pip command installs it |"
        "how can I install it without make",
    ),
    Fact(
        "README.md", "on a laptop CPU or a GPU",
        "Yes, it runs on a laptop CPU too.",
        "可以,它也能在笔记本的 CPU 上运行。",
        "does it run without a GPU | do I need a GPU | can I run it on a laptop | does it work on CPU |"
        "is a GPU required | must I have a GPU | is it needed to have a GPU | what if I have no GPU |"
        "没有 GPU 可以运行吗",
        "can I run it without a GPU | does it work on a laptop | is a GPU needed",
    ),
    Fact(
        "README.md", "Apache-2.0",
        "Apache-2.0.",
        "Apache-2.0。",
        "which license does it have | what is the license | is it open source | under which license is it |"
        "what license is it under | 用的是什么许可证",
        "which license is it under | what license does it have | is the license open source",
    ),
    Fact(
        "docs/architecture.md", "this repository is the worker",
        "A frontend takes requests and routes them; workers run vLLM and answer.",
        "frontend 接收并分发请求,worker 运行 vLLM 并回答。",
        "how is it built | what are the parts | what is the architecture | which processes are there |"
        "what does the system consist of | explain the architecture | explain how it works |"
        "tell me how it is built up | explain the parts of it | how is everything put together",
        "what is the architecture of the system | which parts are there | explain how it is built",
    ),
    Fact(
        "docs/operate.md", "`--admin-token` or `DYN_VLLM_ADMIN_TOKEN`",
        "With `--admin-token` or DYN_VLLM_ADMIN_TOKEN on the worker.",
        "在 worker 上设置 `--admin-token` 或 DYN_VLLM_ADMIN_TOKEN。",
        "how do I protect admin commands | how do I set an admin token | who may use the admin verbs |"
        "which flag sets the admin token | how do I secure the workers",
        "which flag protects admin commands | how do I set a token for admin verbs |"
        "how do I secure admin commands",
    ),
    Fact(
        "docs/configuration.md", "--served-model-name NAME",
        "With `--served-model-name NAME`.",
        "用 `--served-model-name NAME`。",
        "how do I change the model name | which flag sets the model name |"
        "how do I give the model another name |"
        "under which name is the model served | how do I set an alias of the model",
        "which flag changes the name of the model | how do I set the model name |"
        "how do I give the model an alias",
    ),
    Fact(
        "docs/serve.md", "dynamo-vllm serve --config deployment.yaml",
        "Yes: `--config FILE` takes a YAML file that describes frontend and workers.",
        "可以:`--config FILE` 用 YAML 描述 frontend 和 worker。",
        "can I use a config file | how do I use a YAML file | how do I describe a deployment in a file |"
        "which flag reads a YAML file | is there a configuration file",
        "can I describe a deployment in YAML | how do I use a configuration file |"
        "which flag is for a config file",
    ),
)  # fmt: skip

"""status, chat and check --live against a small stand-in for the frontend."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli.running import chat, prove, status_text, tier_proof
from dynamo_vllm.observe import frontend_client, units
from dynamo_vllm.observe.status_data import SystemStatus, Worker
from dynamo_vllm.serving.admin import client as admin_client
from dynamo_vllm.supervise import run_folder
from harness.json_server import answering

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Patch = pytest.MonkeyPatch

Captured = pytest.CaptureFixture[str]

BATCHES = 'dynamo_component_router_kv_zmq_ingress_batches_total{worker_id="1"} '
EVENTS = """\
# TYPE dynamo_component_kv_cache_events_applied counter
dynamo_component_kv_cache_events_applied{event_type="removed",status="ok",worker_id="1"} 5
dynamo_component_kv_cache_events_applied{event_type="stored",status="ok",worker_id="1"} """
METRICS = """\
dynamo_frontend_requests_total{endpoint="completions",model="tiny",status="success"} 7
dynamo_frontend_requests_total{endpoint="chat_completions",model="tiny",status="error"} 2
dynamo_frontend_requests_total{endpoint="completions",model="other",status="success"} 9
dynamo_component_router_requests_total{model="tiny"} 100
dynamo_frontend_inflight_requests{model="tiny"} 3
"""


ENDPOINTS = {"kv_terms": ("compare",), "admin": ("control",)}


def instances(component: str) -> list[dict[str, Any]]:
    return [
        {
            "component": component,
            "endpoint": endpoint,
            "namespace": "dynamo",
            "instance_id": 7,
            "transport": {"tcp": "127.0.0.1:5/abc"},
            "device_type": "cpu",
        }
        for endpoint in ENDPOINTS.get(component, ("generate", "worker_kv_query_source_1", "list_loras"))
    ]


@dataclass
class Frontend:
    """How the stand-in behaves, and what it was asked."""

    models: list[str] = field(default_factory=lambda: ["tiny"])
    components: tuple[str, ...] = ("backend",)
    is_upstreams: bool = False
    """Whether it answers as upstream's frontend, whose /health is what ours has at /instances."""
    closed: set[str] = field(default_factory=set)
    router: str = "kv"
    caches: bool = True
    hands_over: int | None = None
    """Tokens a decode worker takes from a prefill worker; None where there is none."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    chunks: list[str] = field(default_factory=lambda: ["Good ", "day"])
    error: dict[str, Any] | None = None
    url: str = ""
    _known: set[str] = field(default_factory=set)
    _events: int = 0

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is None:
            return self.get(path)
        status, answer = self.post(path, body)
        if status != 200 or not body.get("stream"):
            return status, answer
        deltas = [{"reasoning_content": piece} for piece in self.thoughts]
        deltas += [{"content": piece} for piece in self.chunks]
        frames: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
        frames += [{"error": self.error}] if self.error else []
        text = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames)
        return 200, f": a comment\n\n{text}data: [DONE]\n\n"

    def get(self, path: str) -> tuple[int, Any]:
        if path in self.closed:
            return 404, {"message": f"Route not found: GET {path}"}
        match path:
            case "/health" if self.is_upstreams:
                listed = [entry for component in self.components for entry in instances(component)]
                return 200, {"status": "healthy", "endpoints": [], "instances": listed if self.models else []}
            case "/health":
                return (200 if self.models else 503), {"status": "…", "models": self.models}
            case "/v1/models":
                return 200, {"data": [{"id": name, "context_window": 2048} for name in self.models]}
            case "/instances":
                found = [entry for component in self.components for entry in instances(component)]
                return 200, {"instances": found if self.models else []}
            case "/metrics":
                counted = "" if self.router == "random" else f"{EVENTS}{self._events}\n"
                counted += f"{BATCHES}{self._events}\n" if self.router == "kv" else ""
                return 200, METRICS + counted
        return 404, {"message": "no"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        if path in self.closed:
            return 404, {"message": "Model not found", "code": 404}
        if body.get("temperature", 1) > 2:
            return 400, {"message": "Validation: Temperature must be between 0 and 2"}
        prompt = json.dumps(body.get("prompt") or body["messages"])
        cached = 640 if self.caches and prompt in self._known else 0
        rate = 0.9 if prompt in self._known and (self.caches or self.router == "predicts") else 0.0
        self._events += self.router == "predicts" or (self.caches and prompt not in self._known)
        self._known.add(prompt)
        answer: dict[str, Any] = {"usage": {"prompt_tokens": 700, "completion_tokens": 1}}
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.router != "random":
            answer["nvext"] = {"timing": {"kv_hit_rate": rate}}
        if self.hands_over is not None:
            answer["usage"]["prompt_tokens_details"]["cached_tokens"] = self.hands_over
            answer["nvext"]["worker_id"] = {"prefill_worker_id": 1, "decode_worker_id": 2}
        return 200, answer


@pytest.fixture
def frontend(monkeypatch: Patch, tmp_path: Path) -> Iterator[Frontend]:
    nowhere = {"HOME": str(tmp_path), "DYN_FILE_KV": str(tmp_path / "discovery")}
    monkeypatch.setattr("dynamo_vllm.config.build.environment", lambda: nowhere)
    monkeypatch.setattr(prove, "EVENT_SECONDS", 0.1)
    monkeypatch.setattr(prove, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(prove, "SETTLE_SECONDS", 0)
    behaviour = Frontend()
    with answering(behaviour.answer) as behaviour.url:
        yield behaviour


def proven(frontend: Frontend, capsys: Captured, *argv: str) -> tuple[int, dict[str, str]]:
    code = cli.run(["check", "--live", frontend.url, "--json", *argv])
    return code, {step["name"]: step["outcome"] for step in json.loads(capsys.readouterr().out)}


# --- status -----------------------------------------------------------------------------------------------


def test_status_shows_models_instances_and_figures(frontend: Frontend, capsys: Captured) -> None:
    assert cli.run(["status", frontend.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is True
    assert found["models"] == [
        {"name": "tiny", "ready": True, "context_length": 2048, "requests": 9, "in_flight": 3, "errors": 2}
    ]
    assert found["instances"] == [
        {
            "id": 7,
            "role": "agg",
            "address": "dynamo.backend.generate",
            "transport": "tcp 127.0.0.1:5",
            "device": "cpu",
            "kv_index": True,
        }
    ]


def test_status_text_is_a_table_with_the_role_of_each_worker(frontend: Frontend, capsys: Captured) -> None:
    assert cli.run(["status", frontend.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{frontend.url}  ready"
    assert lines[2:4] == [
        "MODEL  READY  CONTEXT  REQUESTS  IN FLIGHT  ERRORS",
        "tiny   yes    2048     9         3          2",
    ]
    frontend.components = ("backend", "backend-2", "prefill", "mine", "kv_terms", "admin")
    assert cli.run(["status", frontend.url]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[5:10]]
    assert [row[1:3] for row in rows] == [
        ["ROLE", "ENDPOINT"],
        ["decode", "dynamo.backend.generate"],
        ["decode", "dynamo.backend-2.generate"],
        ["-", "dynamo.mine.generate"],
        ["prefill", "dynamo.prefill.generate"],
    ]


def test_status_of_what_cannot_answer_says_so(frontend: Frontend, capsys: Captured, tmp_path: Path) -> None:
    assert cli.run(["status", frontend.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"no worker of namespace dynamo is in discovery at {tmp_path / 'discovery'}; start one, or "
        "give --file-kv or --run-dir"
    )
    frontend.models = []
    assert cli.run(["status", frontend.url]) == 0
    assert "not ready: no model can answer\n\nno worker is registered" in capsys.readouterr().out
    frontend.closed = {"/health"}
    assert cli.run(["status", frontend.url]) == 1
    assert "/health is not that of a frontend" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["chat", "-m", "hello"]])
def test_command_where_nothing_listens_fails_with_what_to_do(
    command: list[str], frontend: Frontend, capsys: Captured
) -> None:
    assert cli.run([*command, "--url", "http://127.0.0.1:1"]) == 1
    assert "error: nothing listens at http://127.0.0.1:1; start a system with" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["chat", "-m", "x"], ["check", "--live"]])
def test_no_time_to_wait_is_refused_and_not_said_of_the_frontend(
    command: list[str], frontend: Frontend, capsys: Captured
) -> None:
    place = command.index("-m") if "-m" in command else len(command)
    for seconds in ("0", "nan", "-1"):
        argv = [*command[:place], frontend.url, *command[place:], f"--timeout={seconds}"]
        assert cli.run(argv) == 2
        assert "must be above 0" in capsys.readouterr().err
    assert cli.run(["status", frontend.url, "--watch", "0"]) == 2


def test_status_of_upstreams_frontend_is_that_of_its_models(frontend: Frontend, capsys: Captured) -> None:
    frontend.is_upstreams, frontend.closed = True, {"/instances"}
    assert cli.run(["status", frontend.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ready"], [model["ready"] for model in found["models"]]) == (True, [True])
    frontend.models = []
    assert cli.run(["status", frontend.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ready"] is False


def test_commands_ask_the_frontend_of_the_serve_that_runs_here(
    frontend: Frontend, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = {"HOME": str(tmp_path)}
    monkeypatch.setattr("dynamo_vllm.config.build.environment", lambda: home)
    folder = run_folder.choose(None, home)
    with folder.opened():
        folder.forget()
        folder.note(frontend.url)
        assert cli.run(["status"]) == 0
        assert capsys.readouterr().out.startswith(f"{frontend.url}  ready")
        assert cli.run(["chat", "-m", "hello"]) == 0
        assert capsys.readouterr().out == "Good day\n"


def worker(number: int, **told: Any) -> Worker:
    return Worker(number, f"aaaa0{number}", number, {"status": "success", **told})


def shown(*workers: Worker, problem: str | None = None) -> list[str]:
    found = SystemStatus("http://x", "namespace n in y", None, problem, list(workers), None)
    return status_text.text(found).splitlines()


def rank(number: int, hit_rate: float | None = 0.5, usage: float = 0.25) -> dict[str, Any]:
    figures = {"running": 3, "waiting": 1, "kv_usage": usage, "tokens_per_second": 10.4}
    return {"rank": number, "hit_rate": hit_rate, **figures}


def test_status_of_workers_stands_without_a_frontend_and_fits_80_columns() -> None:
    lines = shown(
        worker(
            1,
            role="decode",
            state="ready",
            models=["tiny", "alias"],
            adapters=[{"name": "sql", "state": "loaded"}, {"name": "b", "state": "fetching"}],
            ranks=[rank(0)],
            last_error={"message": "the engine\nfailed", "seconds_ago": 185.2},
        ),
        problem="nothing listens",
    )
    assert lines[0:3] == ["http://x  no answer", "", "nothing listens"]
    assert lines[4] == "workers of namespace n in y"
    assert re.split("  +", lines[-2]) == list(status_text.WORKERS)
    assert re.split("  +", lines[-1]) == [
        *("1", "aaaa01", "decode", "ready", "25 %", "50 %", "3", "1", "10", "tiny,alias", "sql,b (fetching)"),
        "3 min ago: the engine failed",
    ]
    wide = shown(worker(2, role="prefill", state="draining", models=["m" * 60], ranks=[rank(0)]))
    assert wide[-2].index("TOK/S") + len("TOK/S") < 80


def test_status_of_a_worker_with_ranks_has_a_line_for_all_and_one_for_each() -> None:
    lines = shown(worker(1, role="agg", state="ready", models=["m"], ranks=[rank(0), rank(1, None, 0.75)]))
    assert [re.split("  +", line.strip()) for line in lines[-3:]] == [
        ["1", "aaaa01", "agg", "ready", "50 %", "-", "6", "2", "21", "m", "-", "-"],
        ["rank 0", "25 %", "50 %", "3", "1", "10"],
        ["rank 1", "75 %", "-", "3", "1", "10"],
    ]


@pytest.mark.parametrize(
    ("error", "state"), [("unreachable", "no answer"), ("no_answer", "no answer"), ("not_allowed", "refuses")]
)
def test_status_of_a_worker_that_does_not_tell(error: str, state: str) -> None:
    lines = shown(Worker(2, "aaaa02", 2, admin_client.failure(error, "why it is so", 403)))
    assert re.split("  +", lines[-1])[:4] == ["2", "aaaa02", "-", state]
    assert lines[-1].endswith("why it is so")


def test_time_since_is_said_in_one_unit() -> None:
    texts = {0.4: "0 s", 119: "119 s", 120: "2 min", 7200: "2 h", 200000: "2 d"}
    assert {seconds: units.ago(seconds) for seconds in texts} == texts


# --- chat -------------------------------------------------------------------------------------------------


def test_one_message_prints_the_answer_and_ends(frontend: Frontend, capsys: Captured) -> None:
    assert cli.run(["chat", frontend.url, "-m", "hello", "--max-tokens", "5", "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out == "Good day\n"
    assert frontend.asked == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5,
            "temperature": 0.5,
            "stream": True,
        }
    ]


def test_piped_text_is_the_message(frontend: Frontend, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert cli.run(["chat", "--url", frontend.url]) == 0
    assert frontend.asked[0]["messages"][-1]["content"] == "from a pipe"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--temperature", "3"], "HTTP 400: Validation: Temperature must be between 0 and 2"),
        ([], "the answer broke off: Service temporarily unavailable"),
    ],
)
def test_error_of_the_server_is_readable_and_ends_with_code_1(
    frontend: Frontend, capsys: Captured, argv: list[str], error: str
) -> None:
    frontend.error = {"message": "Service temporarily unavailable", "code": 503}
    assert cli.run(["chat", frontend.url, "-m", "hello", *argv]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_names_and_errors_of_a_server_cannot_drive_the_terminal(
    frontend: Frontend, monkeypatch: Patch, capsys: Captured
) -> None:
    frontend.models = ["ti\x1b]0;title\x07ny\x9b31m"]
    frontend.error = {"message": "no\x1b[2J\r room\x08", "code": 503}
    assert talk(frontend, monkeypatch, "one", "/model", "/model \x1b[5mother") == 0
    said = capsys.readouterr()
    assert "error: the answer broke off: no[2J room\n" in said.err
    assert "* ti]0;titleny31m\n" in said.out and "[5mother is not served" in said.out
    assert cli.run(["status", frontend.url]) == 0
    shown = said.out + said.err + "".join(capsys.readouterr())
    assert not {"\x1b", "\x07", "\x08", "\r", "\x9b"} & set(
        shown.replace("\x1b[0m", "").replace("\x1b[2m", "")
    )


def talk(frontend: Frontend, monkeypatch: Patch, *lines: str | type[BaseException], words: Any = ()) -> int:
    """A terminal at which these lines are typed."""
    typed = iter(lines)

    def read(_: str) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    return cli.run(["chat", frontend.url, "--system", "Be kind.", *words])


def test_talk_goes_on_with_what_was_said_until_begun_anew(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("one", "two", "/reset", "three", "/clear", "four", "/exit", "five")
    assert talk(frontend, monkeypatch, *words) == 0
    assert [[m["content"] for m in body["messages"]] for body in frontend.asked] == [
        ["Be kind.", "one"],
        ["Be kind.", "one", "Good day", "two"],
        ["Be kind.", "three"],
        ["Be kind.", "four"],
    ]


def test_interrupt_at_the_prompt_and_an_error_leave_the_talk_open(
    frontend: Frontend, monkeypatch: Patch, capsys: Captured
) -> None:
    frontend.closed = {"/v1/chat/completions"}
    assert talk(frontend, monkeypatch, KeyboardInterrupt, "", "one", "/help") == 0
    said = capsys.readouterr()
    assert said.err.startswith("error: tiny does not chat (HTTP 404: Model not found); choose another")
    assert said.out.count(chat.HELP) == 2


def test_interrupt_stops_the_answer_and_keeps_what_came(
    frontend: Frontend, monkeypatch: Patch, capsys: Captured
) -> None:
    whole = frontend_client.FrontendClient.stream

    def interrupted(
        self: frontend_client.FrontendClient, path: str, body: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        yield next(whole(self, path, body))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(frontend_client.FrontendClient, "stream", interrupted)
        assert talk(frontend, monkeypatch, "one") == 0
    assert "Good \n[stopped]\n" in capsys.readouterr().out


def test_thoughts_are_dim_on_a_terminal_and_do_not_go_back(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    frontend.thoughts = ["a ", "sum\x1b[31m\x9b31m"]
    assert talk(frontend, monkeypatch, "one", "two") == 0
    assert "\x1b[2ma sum[31m31m\x1b[0m\nGood day\n" in capsys.readouterr().out
    assert frontend.asked[1]["messages"][2] == {"role": "assistant", "content": "Good day"}
    assert talk(frontend, monkeypatch, "one", words=["--no-reasoning"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "Good day", "hidden by the flag"


def test_another_program_gets_the_answer_alone(frontend: Frontend, capsys: Captured) -> None:
    frontend.thoughts = ["a sum"]
    assert cli.run(["chat", frontend.url, "-m", "hello"]) == 0
    assert capsys.readouterr().out == "Good day\n"
    frontend.chunks = []
    assert cli.run(["chat", frontend.url, "-m", "hello"]) == 0
    assert "the answer is empty after the reasoning" in capsys.readouterr().err


def test_talk_goes_on_with_another_model(frontend: Frontend, monkeypatch: Patch, capsys: Captured) -> None:
    frontend.models = ["tiny", "small"]
    assert talk(frontend, monkeypatch, "one", "/model tiny", "two", "/model large", "/model") == 0
    assert [body["model"] for body in frontend.asked] == ["small", "tiny"]
    assert [m["content"] for m in frontend.asked[1]["messages"]] == ["Be kind.", "one", "Good day", "two"]
    out = capsys.readouterr().out
    assert "large is not served; choose one of small, tiny\n" in out
    assert out.count("  small\n* tiny\n") == 2


def test_chat_where_nothing_is_served_says_so(frontend: Frontend, capsys: Captured) -> None:
    frontend.models = []
    assert cli.run(["chat", frontend.url, "-m", "hello"]) == 1
    assert f"error: {frontend.url} serves no model yet" in capsys.readouterr().err


# --- check --live -----------------------------------------------------------------------------------------


def test_working_system_is_proven_in_every_step_with_a_prompt_for_each(
    frontend: Frontend, capsys: Captured
) -> None:
    code, steps = proven(frontend, capsys, "--strict")
    assert code == 0
    proofs = dict.fromkeys(("health", "model", "answer", "kv event", "prefix cache"), "ok")
    assert steps == {**proofs, "tiers": "skipped"}, "no worker can be found here"
    assert cli.run(["check", "--live", frontend.url]) == 0
    text = capsys.readouterr().out
    assert "the router knew 90% of a repeated prompt, 0% at first; event batches: 1; tries: 1 in" in text
    assert "640 of 700 prompt tokens came from the cache, 0 at first" in text
    said = {json.dumps(body["messages"]) for body in frontend.asked if "messages" in body}
    assert len(said) == 3  # the greeting, and one per proof


@pytest.mark.parametrize(
    ("router", "caches", "code", "strict", "event", "cache"),
    [
        ("kv", False, 1, 1, "FAILED", "FAILED"),
        ("nats", True, 0, 0, "ok", "ok"),
        ("predicts", True, 0, 1, "not proven", "ok"),
        ("random", False, 0, 1, "not proven", "not proven"),
    ],
    ids=["events do not arrive", "events over NATS", "router predicts", "router ignores caches"],
)
def test_outcome_of_the_proofs_depends_on_router_and_caches(
    frontend: Frontend,
    capsys: Captured,
    router: str,
    caches: bool,
    code: int,
    strict: int,
    event: str,
    cache: str,
) -> None:
    frontend.router, frontend.caches = router, caches
    found, steps = proven(frontend, capsys)
    assert (found, steps["kv event"], steps["prefix cache"]) == (code, event, cache)
    assert proven(frontend, capsys, "--strict")[0] == strict


@pytest.mark.parametrize(("tokens", "outcome"), [(700, "ok"), (699, "ok"), (640, "FAILED")])
def test_prefill_and_decode_are_proven_by_the_hand_over(
    frontend: Frontend, capsys: Captured, tokens: int, outcome: str
) -> None:
    frontend.hands_over = tokens
    code, steps = proven(frontend, capsys, "--strict")
    assert code == (0 if outcome == "ok" else 1)
    assert (steps["kv event"], steps["hand-over"]) == ("ok", outcome)
    assert "prefix cache" not in steps


def test_model_without_chat_is_asked_by_completion(frontend: Frontend, capsys: Captured) -> None:
    frontend.closed = {"/v1/chat/completions"}
    assert proven(frontend, capsys)[0] == 0
    assert "prompt" in frontend.asked[-1]


@pytest.mark.parametrize(
    ("closed", "models", "argv", "failed"),
    [
        ({"/v1/chat/completions", "/v1/completions"}, ["tiny"], [], "answer"),
        (set(), ["tiny"], ["--model", "large"], "model"),
        (set(), [], [], "model"),
    ],
)
def test_proof_ends_at_the_step_without_which_nothing_follows(
    frontend: Frontend, capsys: Captured, closed: set[str], models: list[str], argv: list[str], failed: str
) -> None:
    frontend.closed, frontend.models = closed, models
    code, steps = proven(frontend, capsys, *argv)
    assert code == 1
    assert list(steps.items())[-1] == (failed, "FAILED")


def test_upstreams_frontend_is_proven_by_its_models_and_answers(frontend: Frontend, capsys: Captured) -> None:
    frontend.is_upstreams = True
    code, steps = proven(frontend, capsys, "--strict")
    assert (code, steps["health"], steps["answer"]) == (0, "ok", "ok")
    frontend.closed = {"/v1/chat/completions", "/v1/completions"}
    assert proven(frontend, capsys) == (1, {"health": "ok", "model": "ok", "answer": "FAILED"})
    frontend.models = []
    assert proven(frontend, capsys) == (1, {"health": "FAILED", "model": "FAILED"})


def test_server_without_health_is_proven_by_its_models(frontend: Frontend, capsys: Captured) -> None:
    frontend.closed = {"/health"}
    assert proven(frontend, capsys)[1]["health"] == "ok"
    frontend.closed = {"/health", "/v1/models"}
    assert proven(frontend, capsys) == (1, {"connection": "FAILED"})
    frontend.url = "127.0.0.1:1"
    assert proven(frontend, capsys) == (1, {"connection": "FAILED"})


@pytest.mark.parametrize("context_length", [None, 64, 2048, 131072])
def test_prompt_fits_into_the_context_at_one_token_per_letter(context_length: int | None) -> None:
    text = prove.unique_prompt(context_length)
    assert len(text) < (context_length or 4096)
    assert text.isascii()


def test_pictures_in_an_answer_are_named_and_its_words_kept() -> None:
    page = chat.Page(io.StringIO(), shows_reasoning=True)
    page.add(
        {"content": [{"type": "text", "text": "red "}, {"type": "image_url", "image_url": {"url": "x"}}]}
    )
    assert page.answer == "red [image_url]\n"


LOADED = {"rank": 0, "prompt_tokens": 129, "tier_tokens": 128, "is_same": True}


@pytest.mark.parametrize(
    ("reply", "is_paused", "outcome", "figure"),
    [
        ({"ranks": [LOADED, LOADED]}, False, "ok", "5e7: 256 of 258 prompt tokens came from its tiers"),
        ({"ranks": [LOADED, {**LOADED, "tier_tokens": 0}]}, False, "FAILED", "128 of 258 prompt tokens"),
        ({"ranks": [{**LOADED, "is_same": False}]}, False, "FAILED", "with another answer"),
        ({"status": "error", "message": "no room"}, False, "FAILED", "5e7: no room"),
        ({"ranks": [LOADED]}, True, "not proven", "its disk is paused"),
    ],
)
def test_tiers_are_proven_if_every_rank_gives_the_same_answer(
    reply: dict[str, Any], is_paused: bool, outcome: str, figure: str
) -> None:
    step = tier_proof.step("5e7", {"status": "success", **reply}, is_paused=is_paused)
    assert (step.outcome, figure in step.figure) == (outcome, True)


def test_status_shows_tiers_of_workers_that_have_some() -> None:
    moved = {"read_bytes": 2_000_000, "read_seconds": 0.25, "written_bytes": 0, "written_seconds": 0.0}
    host = {"tier": "host", "bytes": 5_000_000_000, "used_bytes": 1_000_000_000, "hit_tokens": 64, **moved}
    disk = {"tier": "disk", "bytes": 500_000_000_000, "used_bytes": None, "hit_tokens": None, **moved}
    rows = [" ".join(line.split()) for line in shown(worker(1, tiers=[host, disk]))[-3:]]
    assert rows == [
        "# TIER SIZE USED HIT TOKENS READ WRITTEN",
        "1 host 5.0 GB 20 % 64 2.0 MB in 0.2 s 0 B in 0.0 s",
        "1 disk 500.0 GB - - 2.0 MB in 0.2 s 0 B in 0.0 s",
    ]
    (row,) = [line for line in shown(worker(1, tiers=[{**disk, "is_paused": True}])) if "500.0 GB" in line]
    assert row.split()[1:3] == ["disk,", "paused"]
    assert not any("TIER" in line for line in shown(worker(1, tiers=[])))

"""Bodies that coding agents, chat front ends and libraries send, written from public documentation.

The words in them mean nothing; their fields, nesting and size do. `all_requests()` returns every one with the
status that it must get.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
MODEL = "demo-chat"
MESSAGES, COUNT, CHAT, RESPONSES = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions",
    "/v1/responses",
)
PICTURE = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100"
        "c9fe92ef0000000049454e44ae426082"
    )
).decode()
"""A PNG with one dot."""
UNKNOWN = "Unsupported parameter(s)"
"""What a chat request with an unknown field gets without --ignore-unknown-fields."""
ANTHROPIC_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "coding-agent/2.1 (external, cli)",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-app": "cli",
}


@dataclass(frozen=True)
class AgentRequest:
    """One request and what it must get."""

    name: str
    path: str
    body: Json
    status: int = 200
    says: str = ""
    """Words of the error, where the status is one."""
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def words(count: int) -> str:
    """Return text of this many words."""
    some = ("read", "the", "file", "before", "you", "change", "it", "and", "run", "all", "tests", "after")
    return " ".join(some[n % len(some)] for n in range(count))


# --- tools ----------------------------------------------------------------------------------------------


def schema(size: int = 6) -> Json:
    """Return a JSON schema with what agents' tools use."""
    properties: Json = {
        "file_path": {"type": "string", "description": words(30)},
        "offset": {"type": "integer", "minimum": 0, "description": words(20)},
        "mode": {"type": "string", "enum": ["content", "files_with_matches", "count"]},
        "replace_all": {"type": "boolean", "default": False},
        "timeout": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
        "todos": {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/$defs/todo"},
        },
    }
    for number in range(size):
        properties[f"option_{number}"] = {
            "type": "object",
            "properties": {"value": {"type": ["string", "null"], "format": "uri", "description": words(25)}},
            "required": ["value"],
            "additionalProperties": False,
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": ["file_path"],
        "additionalProperties": False,
        "$defs": {
            "todo": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
            }
        },
    }


def strict_schema() -> Json:
    """Return one that a strict tool may have: everything is required."""
    path = {"type": "string", "description": words(5)}
    return {
        "type": "object",
        "properties": {"file_path": path},
        "required": ["file_path"],
        "additionalProperties": False,
    }


def anthropic_tools(count: int = 40) -> list[Json]:
    tools: list[Json] = [
        {"name": f"Tool{n}", "description": words(120), "input_schema": schema()} for n in range(count)
    ]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    return tools


def chat_tools(count: int = 3, **more: Any) -> list[Json]:
    return [
        {
            "type": "function",
            "function": {"name": f"tool_{n}", "description": words(20)} | {"parameters": schema(1)} | more,
        }
        for n in range(count)
    ]


def responses_tools(count: int = 20) -> list[Json]:
    return [
        {
            "type": "function",
            "name": f"tool_{n}",
            "description": words(60),
            "strict": False,
            "parameters": schema(2),
        }
        for n in range(count)
    ]


# --- Messages -------------------------------------------------------------------------------------------


def text(said: str, **more: Any) -> Json:
    return {"type": "text", "text": said, **more}


def image() -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


def tool_use(number: int, **given: Any) -> Json:
    return {"type": "tool_use", "id": f"toolu_{number:024}", "name": f"Tool{number % 40}", "input": given}


def tool_result(number: int, content: Any = "done", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number:024}", "content": content, **more}


def user(*content: Any) -> Json:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> Json:
    return {"role": "assistant", "content": content[0] if isinstance(content[0], str) else list(content)}


def thought(said: str = "First I look at the file.") -> Json:
    return {"type": "thinking", "thinking": said, "signature": "RXJhc2VkU2lnbmF0dXJl" * 20}


def messages(*turns: Json, **more: Any) -> Json:
    return {"model": MODEL, "max_tokens": 32, "messages": list(turns) or [user("Say hello.")], **more}


CACHED: Json = {"cache_control": {"type": "ephemeral"}}
SYSTEM = [
    text("You are a coding agent."),
    text(words(20_000), cache_control={"type": "ephemeral", "ttl": "1h"}),
]
CALLED = (
    user(text("<reminder>Be short.</reminder>"), text("Fix the test.", **CACHED)),
    assistant(
        text("I read two files."), tool_use(1, file_path="a.py"), tool_use(2, file_path="b.py", offset=3)
    ),
    user(
        tool_result(1, [text("def a(): ...")]), tool_result(2, "no such file", is_error=True), text("Go on.")
    ),
)


def coding_turn(**more: Any) -> Json:
    """The request that such an agent sends most: long system prompt, dozens of tools, calls before it."""
    given: Json = {
        "system": SYSTEM,
        "tools": anthropic_tools(),
        "metadata": {"user_id": "user_0123_account__session_4567"},
        "thinking": {"type": "enabled", "budget_tokens": 8000},
        "temperature": 1,
        "stream": True,
        "max_tokens": 32000,
    }
    return messages(*CALLED, **(given | more))


def long_talk(turns: int = 200) -> Json:
    """Half of the turns call a tool."""
    said: list[Json] = []
    for number in range(turns // 4):
        said += [
            user(f"Step {number}."),
            assistant(thought(), text("Now."), tool_use(number, file_path=f"{number}.py")),
            user(tool_result(number, words(40))),
            assistant(text(words(20))),
        ]
    return messages(*said, user("Sum up."), tools=anthropic_tools(3))


ODD_TOOLS: dict[str, Json] = {
    "web search": {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    "bash": {"type": "bash_20250124", "name": "bash"},
    "editor": {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
    "memory": {"type": "memory_20250818", "name": "memory"},
    "code execution": {"type": "code_execution_20250825", "name": "code_execution"},
    "tool search": {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
}


def messages_requests() -> list[AgentRequest]:
    def of(name: str, body: Json, status: int = 200, says: str = "", path: str = MESSAGES) -> AgentRequest:
        return AgentRequest(f"messages: {name}", path, body, status, says, ANTHROPIC_HEADERS)

    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
    pdf = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQ="},
    }
    found: Json = {
        "type": "search_result",
        "source": "https://example.com",
        "title": "A page",
        "content": [text("hello")],
        "citations": {"enabled": True},
    }
    tool_reference = {"type": "tool_reference", "tool_name": "Tool1"}
    counted = {k: v for k, v in coding_turn().items() if k not in ("stream", "max_tokens", "temperature")}
    one_tool = anthropic_tools(1)
    return [
        of("a turn of a coding agent", coding_turn()),
        of("the same, not streamed", coding_turn(stream=False)),
        of("tokens of such a turn", counted, path=COUNT),
        of("a probe with one token", messages(user("quota"), max_tokens=1, metadata={"user_id": "u"})),
        of("200 turns", long_talk()),
        of("thoughts in history", messages(user("a"), assistant(thought(), text("b")), user("c"))),
        of(
            "redacted thoughts",
            messages(
                user("a"), assistant({"type": "redacted_thinking", "data": "eA=="}, text("b")), user("c")
            ),
        ),
        of(
            "thoughts between calls",
            messages(
                user("a"),
                assistant(thought(), tool_use(1)),
                user(tool_result(1)),
                assistant(thought(), tool_use(2)),
                user(tool_result(2)),
                tools=anthropic_tools(3),
            ),
        ),
        of("thinking adaptive", messages(thinking={"type": "adaptive"}, output_config={"effort": "high"})),
        of("thinking disabled", messages(thinking={"type": "disabled"})),
        of(
            "result without content",
            messages(*CALLED[:2], user({"type": "tool_result", "tool_use_id": "toolu_1"})),
        ),
        of("empty result", messages(*CALLED[:2], user(tool_result(1, ""), tool_result(2, [])))),
        of(
            "empty text beside a call",
            messages(user("a"), assistant(text(""), tool_use(1)), user(tool_result(1))),
        ),
        of("cached result", messages(*CALLED[:2], user(tool_result(1, **CACHED), tool_result(2, **CACHED)))),
        of(
            "picture in a result",
            messages(*CALLED[:2], user(tool_result(1, [text("shot"), image()]))),
            400,
            "takes text only",
        ),
        of("picture of the user", messages(user(text("what is it"), image())), 400, "takes text only"),
        of("document as text", messages(user(document, text("sum up"))), 400, '"document" is not supported'),
        of("document as PDF", messages(user(pdf, text("sum up"))), 400, '"document" is not supported'),
        of("search result", messages(user(found, text("sum up"))), 400, '"search_result" is not supported'),
        of(
            "reference to a tool",
            messages(*CALLED[:2], user(tool_result(1, [tool_reference]))),
            400,
            "only text and image are supported",
        ),
        of("system as text", messages(system="Be short.")),
        of("empty system", messages(system=[])),
        of(
            "system message within",
            messages(user("a"), {"role": "system", "content": "Be short."}, user("b")),
        ),
        of("answer begun by the client", messages(user("a"), assistant("The answer is"))),
        of("two users in a row", messages(user("a"), user("b"))),
        of("stop sequences", messages(stop_sequences=["\n\nHuman:", "</done>"])),
        of("many stop sequences", messages(stop_sequences=[f"</{n}>" for n in range(8)]), 400, "at most 4"),
        of("service tier", messages(service_tier="auto", inference_geo="us")),
        of("top_k and top_p", messages(top_k=5, top_p=0.9, temperature=0.1)),
        of(
            "context management",
            messages(
                context_management={
                    "edits": [
                        {
                            "type": "clear_tool_uses_20250919",
                            "trigger": {"type": "input_tokens", "value": 30000},
                            "keep": {"type": "tool_uses", "value": 3},
                        },
                        {"type": "clear_thinking_20251015", "keep": "all"},
                    ]
                }
            ),
        ),
        of("servers and container", messages(mcp_servers=[], container=None)),
        of(
            "output as JSON", messages(output_config={"format": {"type": "json_schema", "schema": schema(1)}})
        ),
        of("cache control of the whole", messages(cache_control={"type": "ephemeral"})),
        of("choice auto", messages(tools=one_tool, tool_choice={"type": "auto"})),
        of(
            "choice any",
            messages(tools=one_tool, tool_choice={"type": "any", "disable_parallel_tool_use": True}),
        ),
        of("choice of a tool", messages(tools=one_tool, tool_choice={"type": "tool", "name": "Tool0"})),
        of("choice none", messages(tools=one_tool, tool_choice={"type": "none"})),
        of("tools empty", messages(tools=[])),
        of(
            "tool with more fields",
            messages(
                tools=[
                    {
                        **one_tool[0],
                        "input_schema": strict_schema(),
                        "type": "custom",
                        "strict": True,
                        "defer_loading": True,
                        "eager_input_streaming": True,
                        "input_examples": [{"file_path": "a"}],
                        "allowed_callers": ["direct"],
                    }
                ]
            ),
        ),
        *(
            of(f"tool of the server: {name}", messages(tools=[tool, *one_tool]), 400, "is not supported")
            for name, tool in ODD_TOOLS.items()
        ),
        of("fields of tomorrow", messages(speed="fast", unknown_field={"a": 1})),
    ]


# --- Responses ------------------------------------------------------------------------------------------


def item(role: str, said: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}


def reasoning(number: int = 0) -> Json:
    return {
        "type": "reasoning",
        "id": f"rs_{number:032}",
        "summary": [{"type": "summary_text", "text": "**Looking** at it"}],
        "content": None,
        "encrypted_content": "Z0FBQUFBQm8=" * 40,
    }


def function_call(number: int) -> Json:
    return {
        "type": "function_call",
        "name": f"tool_{number % 20}",
        "arguments": '{"file_path":"a.py"}',
        "call_id": f"call_{number}",
    }


def function_output(number: int, output: Any = "done") -> Json:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def responses(*items: Json, **more: Any) -> Json:
    return {"model": MODEL, "input": list(items) or [item("user", "hello")], "max_output_tokens": 16, **more}


def codex_turn(**more: Any) -> Json:
    """What a coding agent over Responses sends in the middle of its work."""
    given: Json = {
        "instructions": words(20_000),
        "tools": responses_tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "low"},
    }
    history = (
        item("developer", "<permissions>read only</permissions>"),
        item("user", "<environment_context><cwd>/src</cwd></environment_context>"),
        item("user", "Fix the test."),
        reasoning(1),
        item("assistant", "I look at two files."),
        function_call(1),
        function_call(2),
        function_output(1),
        function_output(2, '{"output":"x","metadata":{"exit_code":1}}'),
    )
    return responses(*history, **(given | more))


def long_session(turns: int = 200) -> Json:
    items: list[Json] = []
    for number in range(turns // 4):
        items += [
            item("user", f"Step {number}."),
            reasoning(number),
            function_call(number),
            function_output(number, words(40)),
        ]
        items.append(item("assistant", words(20)))
    return responses(*items, item("user", "Sum up."), tools=responses_tools(3), store=False)


def responses_requests() -> list[AgentRequest]:
    def of(name: str, body: Json, status: int = 200, says: str = "") -> AgentRequest:
        return AgentRequest(
            f"responses: {name}",
            RESPONSES,
            body,
            status,
            says,
            {"originator": "coding_agent_cli", "session_id": "0199a213"},
        )

    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    custom = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar}
    custom_turn = (
        item("user", "a"),
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "call_9"},
        {"type": "custom_tool_call_output", "call_id": "call_9", "output": "ok"},
    )
    shell_turn = (
        item("user", "a"),
        {
            "type": "local_shell_call",
            "call_id": "call_8",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "timeout_ms": 10, "env": {}},
        },
        function_output(8),
    )
    seen = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    return [
        of("a turn of a coding agent", codex_turn()),
        of("the same, not streamed", codex_turn(stream=False)),
        of("200 turns", long_session()),
        of("text as input", {"model": MODEL, "input": "hello", "max_output_tokens": 8}),
        of("short messages without type", responses({"role": "user", "content": "hello"})),
        of(
            "answer with id and status",
            responses(
                item("user", "a"),
                {**item("assistant", "b"), "id": "msg_1", "status": "completed"},
                item("user", "c"),
            ),
        ),
        of(
            "answer with a phase",
            responses(
                item("user", "a"), {**item("assistant", "b"), "phase": "commentary"}, item("user", "c")
            ),
        ),
        of(
            "reasoning alone",
            responses(item("user", "a"), reasoning(), item("assistant", "b"), item("user", "c")),
        ),
        of(
            "reasoning without id",
            responses(
                item("user", "a"),
                {k: v for k, v in reasoning().items() if k != "id"},
                item("assistant", "b"),
                item("user", "c"),
            ),
        ),
        of(
            "reasoning without summary",
            responses(
                item("user", "a"),
                {"type": "reasoning", "id": "rs_1", "encrypted_content": "eA=="},
                item("user", "c"),
            ),
        ),
        of(
            "call with id and status",
            responses(
                item("user", "a"),
                {**function_call(1), "id": "fc_1", "status": "completed"},
                function_output(1),
                tools=responses_tools(3),
            ),
        ),
        of(
            "output as list",
            responses(
                item("user", "a"),
                function_call(1),
                function_output(1, [{"type": "input_text", "text": "x"}]),
                tools=responses_tools(3),
            ),
        ),
        of(
            "picture as output",
            responses(
                item("user", "a"), function_call(1), function_output(1, [seen]), tools=responses_tools(3)
            ),
            400,
            "takes text only",
        ),
        of(
            "picture of the user",
            responses(
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, seen]}
            ),
            400,
            "takes text only",
        ),
        of("custom tool", responses(tools=[custom]), 400, "only function tools"),
        of(
            "custom tool beside functions",
            responses(tools=[*responses_tools(1), custom]),
            400,
            "only function tools",
        ),
        of("custom call in history", responses(*custom_turn, tools=[custom]), 400, "Failed to deserialize"),
        of(
            "local shell",
            responses(*shell_turn, tools=[{"type": "local_shell"}]),
            400,
            "Failed to deserialize",
        ),
        of(
            "web search",
            responses(tools=[{"type": "web_search", "external_web_access": False}]),
            400,
            "only function tools",
        ),
        of(
            "web search in history",
            responses(
                item("user", "a"),
                {
                    "type": "web_search_call",
                    "id": "ws_1",
                    "status": "completed",
                    "action": {"type": "search", "query": "x"},
                },
                item("user", "b"),
            ),
        ),
        of(
            "tools in a namespace",
            responses(
                tools=[{"type": "namespace", "name": "mcp", "description": "x", "tools": responses_tools(1)}]
            ),
        ),
        of(
            "compaction in history",
            responses({"type": "compaction", "encrypted_content": "eA=="}, item("user", "a")),
        ),
        of("choice required", responses(tools=responses_tools(1), tool_choice="required")),
        of(
            "choice of a tool",
            responses(tools=responses_tools(1), tool_choice={"type": "function", "name": "tool_0"}),
        ),
        of("choice none", responses(tools=responses_tools(1), tool_choice="none", parallel_tool_calls=False)),
        of(
            "answer as JSON",
            responses(
                text={
                    "format": {"type": "json_schema", "name": "a", "strict": True, "schema": schema(1)},
                    "verbosity": "medium",
                }
            ),
        ),
        of(
            "metadata of the client",
            responses(client_metadata={"x": "y"}, metadata={"a": "b"}, user="u", safety_identifier="s"),
        ),
        of("effort", responses(reasoning={"effort": "xhigh", "summary": "detailed"})),
        of("effort none", responses(reasoning={"effort": "none"})),
        of("service tier", responses(service_tier="priority")),
        of("cache retention", responses(prompt_cache_retention="24h", prompt_cache_key="k")),
        of("truncation", responses(truncation="auto", top_logprobs=0)),
        of("limit of calls", responses(max_tool_calls=3), 501, "`max_tool_calls` is not supported"),
        of(
            "nulls",
            responses(
                instructions=None,
                reasoning=None,
                tools=None,
                text=None,
                temperature=None,
                top_p=None,
                previous_response_id=None,
                metadata=None,
                include=None,
            ),
        ),
    ]


# --- Chat completions -----------------------------------------------------------------------------------


def chat(*turns: Json, **more: Any) -> Json:
    return {
        "model": MODEL,
        "messages": list(turns) or [{"role": "user", "content": "hello"}],
        "max_tokens": 16,
        **more,
    }


def chat_call(*numbers: int, **more: Any) -> Json:
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": f"tool_{n}", "arguments": '{"file_path": "a"}'},
        }
        for n in numbers
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def chat_result(number: int, content: Any = "done", **more: Any) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content, **more}


def long_chat(turns: int = 200) -> Json:
    said: list[Json] = [{"role": "system", "content": words(3000)}]
    for number in range(turns // 4):
        said += [
            {"role": "user", "content": f"Step {number}."},
            chat_call(number % 3),
            chat_result(number % 3, words(40)),
            {"role": "assistant", "content": words(20)},
        ]
    return chat(*said, {"role": "user", "content": "Sum up."}, tools=chat_tools())


def chat_requests() -> list[AgentRequest]:
    def of(name: str, body: Json, status: int = 200, says: str = "") -> AgentRequest:
        return AgentRequest(f"chat: {name}", CHAT, body, status, says)

    asked = {"role": "user", "content": "hello"}
    called = (asked, chat_call(0, 1), chat_result(0), chat_result(1, "failed"))
    seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    nulls = dict.fromkeys(
        (
            "temperature",
            "top_p",
            "stop",
            "seed",
            "tools",
            "tool_choice",
            "response_format",
            "logit_bias",
            "user",
        )
    )
    return [
        of("a web interface streams", chat(stream=True, stream_options={"include_usage": True})),
        of("tools empty", chat(tools=[]), 400, "tools array cannot be empty"),
        of("a web interface, all sliders unset", chat(**nulls, n=None, stream=None, stream_options=None)),
        of(
            "a web interface makes a title",
            chat(asked, stream=False, max_completion_tokens=1000, metadata={"task": "title"}),
        ),
        of(
            "a web interface's sliders",
            chat(top_k=40, min_p=0.05, repeat_penalty=1.1, num_ctx=8192, keep_alive="5m"),
            400,
            UNKNOWN,
        ),
        of(
            "a web interface's features",
            chat(chat_id="c", session_id="s", id="m", features={"web_search": False}, background_tasks={}),
            400,
            UNKNOWN,
        ),
        of("content as parts", chat({"role": "user", "content": [{"type": "text", "text": "hello"}]})),
        of(
            "picture",
            chat({"role": "user", "content": [{"type": "text", "text": "what is it"}, seen]}),
            400,
            "takes text only",
        ),
        of(
            "tools after calls",
            chat(*called, tools=chat_tools(), tool_choice="auto", parallel_tool_calls=True),
        ),
        of("tools streamed", chat(*called, tools=chat_tools(), stream=True)),
        of(
            "calls beside text",
            chat(asked, chat_call(0, content="I look."), chat_result(0), tools=chat_tools()),
        ),
        of(
            "calls beside empty text",
            chat(asked, chat_call(0, content=""), chat_result(0), tools=chat_tools()),
        ),
        of(
            "call without content",
            chat(asked, {k: v for k, v in chat_call(0).items() if k != "content"}, chat_result(0)),
        ),
        of(
            "result with a name",
            chat(*called[:2], chat_result(0, name="tool_0"), chat_result(1, name="tool_1")),
        ),
        of(
            "result as parts",
            chat(*called[:2], chat_result(0, [{"type": "text", "text": "x"}]), chat_result(1, "")),
        ),
        of("choice required", chat(tools=chat_tools(1), tool_choice="required")),
        of(
            "choice of a tool",
            chat(tools=chat_tools(1), tool_choice={"type": "function", "function": {"name": "tool_0"}}),
        ),
        of("strict tools", chat(tools=chat_tools(1, strict=True, parameters=strict_schema()))),
        of(
            "strict tool with an optional field",
            chat(tools=chat_tools(1, strict=True)),
            400,
            "must include property",
        ),
        of("tool without parameters", chat(tools=[{"type": "function", "function": {"name": "now"}}])),
        of(
            "functions of old",
            chat(functions=[{"name": "f", "parameters": schema(1)}], function_call="auto"),
            501,
            "deprecated",
        ),
        of(
            "messages of old",
            chat(
                asked,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "x"},
            ),
        ),
        of(
            "answer as JSON",
            chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "strict": True, "schema": schema(1)},
                }
            ),
        ),
        of("answer as any JSON", chat(response_format={"type": "json_object"})),
        of(
            "a library's usual fields",
            chat(
                n=1,
                temperature=0.7,
                stream=False,
                user="u",
                seed=1,
                logprobs=False,
                frequency_penalty=0,
                presence_penalty=0,
            ),
        ),
        of("developer role", chat({"role": "developer", "content": "Be short."}, asked)),
        of(
            "system within",
            chat(asked, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}, asked),
        ),
        of("names of speakers", chat({"role": "user", "content": "hello", "name": "clara"})),
        of("effort", chat(reasoning_effort="low")),
        of("verbosity", chat(verbosity="low"), 400, UNKNOWN),
        of(
            "thoughts in history",
            chat(asked, {"role": "assistant", "content": "a", "reasoning_content": "b"}, asked),
        ),
        of(
            "blocks of a proxy",
            chat(
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
                },
                asked,
            ),
        ),
        of(
            "thoughts of a proxy",
            chat(
                asked,
                {"role": "assistant", "content": "a", "thinking_blocks": [thought()]},
                asked,
                thinking={"type": "enabled", "budget_tokens": 1024},
            ),
        ),
        of(
            "fields of a proxy",
            chat(metadata={"user_api_key": "x"}, litellm_session_id="s", drop_params=True, timeout=600),
            400,
            UNKNOWN,
        ),
        of(
            "fields of new models",
            chat(
                store=False,
                service_tier="auto",
                prompt_cache_key="k",
                modalities=["text"],
                prediction=None,
                audio=None,
            ),
        ),
        of("identifier of the user", chat(safety_identifier="s"), 400, UNKNOWN),
        of("template's arguments", chat(chat_template_kwargs={"enable_thinking": False})),
        of("empty assistant", chat(asked, {"role": "assistant", "content": ""}, asked)),
        of(
            "answer begun by the client",
            chat(
                asked,
                {"role": "assistant", "content": "The"},
                continue_final_message=True,
                add_generation_prompt=False,
            ),
        ),
        of("200 turns", long_chat()),
        of("20 k tokens of system", chat({"role": "system", "content": words(20_000)}, asked, stream=True)),
        of("fields of tomorrow", chat(unknown_field={"a": 1}), 400, UNKNOWN),
    ]


def all_requests() -> list[AgentRequest]:
    parts: tuple[Callable[[], list[AgentRequest]], ...] = (
        messages_requests,
        responses_requests,
        chat_requests,
    )
    return [request for part in parts for request in part()]

"""Bodies that coding agents, chat front ends and libraries send, written from public documentation.

The words in them mean nothing; their fields, nesting and size do. `all_requests()` returns every one with the
status that it must get.
"""

from __future__ import annotations

import base64
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
    value = {"type": ["string", "null"], "format": "uri", "description": words(25)}
    option = {"type": "object", "properties": {"value": value}, "required": ["value"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": words(30)},
            "offset": {"type": "integer", "minimum": 0, "description": words(20)},
            "replace_all": {"type": "boolean", "default": False},
            "timeout": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
            "todos": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/todo"}},
            **{f"option_{number}": option for number in range(size)},
        },
        "required": ["file_path"],
        "additionalProperties": False,
        "$defs": {"todo": {"type": "string", "minLength": 1, "enum": ["pending", "completed"]}},
    }


def strict_schema() -> Json:
    """Return one that a strict tool may have: everything is required."""
    required = {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
    return {**required, "additionalProperties": False}


def anthropic_tools(count: int = 40) -> list[Json]:
    tools: list[Json] = [
        {"name": f"Tool{n}", "description": words(120), "input_schema": schema()} for n in range(count)
    ]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    return tools


def chat_tools(count: int = 3, **more: Any) -> list[Json]:
    about = {"description": words(20), "parameters": schema(1), **more}
    return [{"type": "function", "function": {"name": f"tool_{n}", **about}} for n in range(count)]


def responses_tools(count: int = 20) -> list[Json]:
    tool = {"type": "function", "description": words(60), "strict": False, "parameters": schema(2)}
    return [{**tool, "name": f"tool_{n}"} for n in range(count)]


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


def messages_requests() -> list[AgentRequest]:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
    tool_reference = {"type": "tool_reference", "tool_name": "Tool1"}
    counted = {k: v for k, v in coding_turn().items() if k not in ("stream", "max_tokens", "temperature")}
    one_tool = anthropic_tools(1)
    server_tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    redacted = {"type": "redacted_thinking", "data": "eA=="}
    edits = [
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 30000}},
        {"type": "clear_thinking_20251015", "keep": "all"},
    ]
    rich_tool = {**one_tool[0], "input_schema": strict_schema(), "type": "custom", "strict": True}
    rich_tool |= {"defer_loading": True, "eager_input_streaming": True, "allowed_callers": ["direct"]}
    thoughts_between_calls = (
        *(user("a"), assistant(redacted, text("b")), user("c")),
        *(assistant(thought(), tool_use(1)), user(tool_result(1, ""))),
        *(assistant(thought(), text(""), tool_use(2)), user(tool_result(2, **CACHED))),
    )
    answered: dict[str, Json] = {
        "a turn of a coding agent": coding_turn(),
        "the same, not streamed": coding_turn(stream=False),
        "200 turns": long_talk(),
        "thoughts between calls": messages(*thoughts_between_calls, tools=anthropic_tools(3)),
        "thinking adaptive": messages(thinking={"type": "adaptive"}, output_config={"effort": "high"}),
        "result without content": messages(
            *CALLED[:2], user({"type": "tool_result", "tool_use_id": "toolu_1"}, tool_result(2, []))
        ),
        "system message within": messages(
            user("a"), {"role": "system", "content": "Be short."}, user("b"), system=[]
        ),
        "answer begun by the client": messages(user("a"), user("b"), assistant("The answer is")),
        "settings": messages(
            **{"stop_sequences": ["\n\nHuman:", "</done>"], "service_tier": "auto", "inference_geo": "us"},
            **{"top_k": 5, "top_p": 0.9, "temperature": 0.1, "mcp_servers": [], "container": None},
            **{"context_management": {"edits": edits}, "unknown_field": {"a": 1}, "tools": [], **CACHED},
        ),
        "output as JSON": messages(output_config={"format": {"type": "json_schema", "schema": schema(1)}}),
        "tool with more fields": messages(tools=[rich_tool]),
    }
    for choice in ({"type": "any"}, {"type": "tool", "name": "Tool0"}):
        answered[f"choice {choice['type']}"] = messages(tools=one_tool, tool_choice=choice)
    refused: dict[str, tuple[Json, str]] = {
        "picture in a result": (
            messages(*CALLED[:2], user(tool_result(1, [text("shot"), image()]))),
            "takes text only",
        ),
        "picture of the user": (messages(user(text("what is it"), image())), "takes text only"),
        "document": (messages(user(document, text("sum up"))), '"document" is not supported'),
        "reference to a tool": (
            messages(*CALLED[:2], user(tool_result(1, [tool_reference]))),
            "only text and image are supported",
        ),
        "many stop sequences": (messages(stop_sequences=[f"</{n}>" for n in range(8)]), "at most 4"),
        "tool of the server": (messages(tools=[server_tool, *one_tool]), "is not supported"),
    }
    of_counting = AgentRequest("messages: tokens of a turn", COUNT, counted, headers=ANTHROPIC_HEADERS)
    return [of_counting, *of_path(MESSAGES, answered, refused, ANTHROPIC_HEADERS)]


def of_path(
    path: str,
    answered: dict[str, Json],
    refused: dict[str, tuple[Json, str]],
    headers: dict[str, str] | None = None,
) -> list[AgentRequest]:
    kind, sent = path.rpartition("/v1/")[2].partition("/")[0], headers or {}
    return [
        *(AgentRequest(f"{kind}: {name}", path, body, headers=sent) for name, body in answered.items()),
        *(
            AgentRequest(f"{kind}: {name}", path, body, 400, says, sent)
            for name, (body, says) in refused.items()
        ),
    ]


# --- Responses ------------------------------------------------------------------------------------------


def item(role: str, said: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}


def reasoning(number: int = 0) -> Json:
    summary = [{"type": "summary_text", "text": "**Looking** at it"}]
    hidden = {"content": None, "encrypted_content": "Z0FBQUFBQm8=" * 40}
    return {"type": "reasoning", "id": f"rs_{number:032}", "summary": summary, **hidden}


def function_call(number: int) -> Json:
    about = {"name": f"tool_{number % 20}", "arguments": '{"file_path":"a.py"}'}
    return {"type": "function_call", "call_id": f"call_{number}", **about}


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
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    custom = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar}
    custom_turn = (
        item("user", "a"),
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "call_9"},
        {"type": "custom_tool_call_output", "call_id": "call_9", "output": "ok"},
    )
    seen = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    nothing = dict.fromkeys(
        ("instructions", "reasoning", "tools", "text", "temperature", "top_p", "previous_response_id")
    )
    without_id = {k: v for k, v in reasoning().items() if k != "id"}
    called = (item("user", "a"), {**function_call(1), "id": "fc_1", "status": "completed"})
    search = {"type": "search", "query": "x"}
    history = (
        *({"role": "user", "content": "hello"}, reasoning(), item("assistant", "b"), item("user", "c")),
        *(without_id, {**item("assistant", "b"), "id": "msg_1", "status": "completed"}, item("user", "d")),
        *({"type": "reasoning", "id": "rs_1", "encrypted_content": "eA=="}, item("user", "e")),
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": search},
        *({**item("assistant", "b"), "phase": "commentary"}, item("user", "f")),
        *({"type": "compaction", "encrypted_content": "eA=="}, item("user", "g")),
    )
    output_format = {"type": "json_schema", "name": "a", "strict": True, "schema": schema(1)}
    in_namespace = {"type": "namespace", "name": "mcp", "description": "x", "tools": responses_tools(1)}
    answered: dict[str, Json] = {
        "a turn of a coding agent": codex_turn(),
        "200 turns": long_session(),
        "history of all kinds": responses(*history),
        "output as list": responses(
            *called, function_output(1, [{"type": "input_text", "text": "x"}]), tools=responses_tools(3)
        ),
        "tools in a namespace": responses(tools=[in_namespace]),
        "choice required": responses(tools=responses_tools(1), tool_choice="required"),
        "answer as JSON": responses(text={"format": output_format, "verbosity": "medium"}),
        "settings": responses(
            **{"client_metadata": {"x": "y"}, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"},
            **{"reasoning": {"effort": "xhigh", "summary": "detailed"}, "service_tier": "priority"},
            **{"prompt_cache_retention": "24h", "prompt_cache_key": "k", "truncation": "auto"},
            top_logprobs=0,
        ),
        "nulls": responses(**nothing, metadata=None, include=None),
    }
    shown = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, seen]}
    refused: dict[str, tuple[Json, str]] = {
        "picture as output": (responses(*called, function_output(1, [seen])), "takes text only"),
        "picture of the user": (responses(shown), "takes text only"),
        "custom tool beside functions": (
            responses(tools=[*responses_tools(1), custom]),
            "only function tools",
        ),
        "custom call in history": (responses(*custom_turn, tools=[custom]), "Failed to deserialize"),
    }
    limited = responses(max_tool_calls=3)
    return [
        AgentRequest(
            "responses: limit of calls", RESPONSES, limited, 501, "`max_tool_calls` is not supported"
        ),
        *of_path(RESPONSES, answered, refused, {"originator": "coding_agent_cli", "session_id": "0199a213"}),
    ]


# --- Chat completions -----------------------------------------------------------------------------------


def chat(*turns: Json, **more: Any) -> Json:
    said = list(turns) or [{"role": "user", "content": "hello"}]
    return {"model": MODEL, "messages": said, "max_tokens": 16, **more}


def chat_call(*numbers: int, **more: Any) -> Json:
    called = '{"file_path": "a"}'
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": f"tool_{n}", "arguments": called}}
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
    asked = {"role": "user", "content": "hello"}
    called = (asked, chat_call(0, 1), chat_result(0), chat_result(1, "failed"))
    seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    unset = ("temperature", "top_p", "stop", "seed", "tools", "tool_choice", "response_format", "logit_bias")
    old_call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    without_content = {k: v for k, v in chat_call(0).items() if k != "content"}
    parts = [{"type": "text", "text": "hello"}]
    cached_parts = [{**parts[0], "cache_control": {"type": "ephemeral"}}]
    output_format = {"name": "a", "strict": True, "schema": schema(1)}
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "b", "thinking_blocks": [thought()]}
    talk = (
        *({"role": "developer", "content": cached_parts}, {**asked, "content": parts, "name": "clara"}),
        *(thinking, asked),
        *({"role": "assistant", "content": ""}, {"role": "system", "content": "b"}, asked),
        *(old_call, {"role": "function", "name": "f", "content": "x"}, asked),
    )
    calls = (
        *(asked, chat_call(0, content="I look."), chat_result(0, name="tool_0"), asked),
        *(chat_call(1, content=""), chat_result(1, parts), asked, without_content, chat_result(0, "")),
    )
    answered: dict[str, Json] = {
        "a web interface, all sliders unset": chat(
            **dict.fromkeys(unset), user=None, n=None, stream=None, stream_options=None
        ),
        "roles, parts and thoughts": chat(*talk, thinking={"type": "enabled", "budget_tokens": 1024}),
        "calls and results": chat(*calls, tools=chat_tools()),
        "tools after calls": chat(*called, tools=chat_tools(), tool_choice="auto", parallel_tool_calls=True),
        "choice required": chat(tools=chat_tools(1), tool_choice="required"),
        "strict tools": chat(tools=chat_tools(1, strict=True, parameters=strict_schema())),
        "tool without parameters": chat(tools=[{"type": "function", "function": {"name": "now"}}]),
        "answer as JSON": chat(response_format={"type": "json_schema", "json_schema": output_format}),
        "settings": chat(
            **{"n": 1, "temperature": 0.7, "user": "u", "seed": 1, "logprobs": False, "store": False},
            **{"frequency_penalty": 0, "presence_penalty": 0, "reasoning_effort": "low"},
            **{"service_tier": "auto", "prompt_cache_key": "k", "modalities": ["text"], "prediction": None},
            **{"audio": None, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        "answer begun by the client": chat(
            asked,
            {"role": "assistant", "content": "The"},
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        "200 turns": long_chat(),
        "20 k tokens of system": chat({"role": "system", "content": words(20_000)}, asked, stream=True),
    }
    refused: dict[str, tuple[Json, str]] = {
        "tools empty": (chat(tools=[]), "tools array cannot be empty"),
        "picture": (chat({"role": "user", "content": [*parts, seen]}), "takes text only"),
        "strict tool with an optional field": (
            chat(tools=chat_tools(1, strict=True)),
            "must include property",
        ),
        "a web interface's sliders": (chat(repeat_penalty=1.1, num_ctx=8192, keep_alive="5m"), UNKNOWN),
        "fields of tomorrow": (chat(unknown_field={"a": 1}), UNKNOWN),
    }
    of_old = chat(functions=[{"name": "f", "parameters": schema(1)}], function_call="auto")
    return [
        AgentRequest("chat: functions of old", CHAT, of_old, 501, "deprecated"),
        *of_path(CHAT, answered, refused),
    ]


def all_requests() -> list[AgentRequest]:
    return [*messages_requests(), *responses_requests(), *chat_requests()]

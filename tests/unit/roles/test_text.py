"""Text mode over the fake engine: OpenAI bodies in, OpenAI chunks out."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.parts import FakeRenderer
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import AnswerPart, Guide, Job, Output
from dynamo_vllm.roles.text import AggregatedText
from harness.fakes import outputs


async def role(renderer: FakeRenderer | None = None) -> tuple[AggregatedText, FakeEngine]:
    engine = FakeEngine(FakeSpec(), lambda figures: None)
    return AggregatedText(engine.facts, renderer or FakeRenderer(1000), "m"), engine


async def job_for(body: dict[str, Any], renderer: FakeRenderer | None = None) -> Job:
    made, _ = await role(renderer)
    return await made.prepare(made.parse(body), "j")


async def answer(body: dict[str, Any]) -> list[dict[str, Any]]:
    made, engine = await role()
    request = made.parse(body)
    job = await made.prepare(request, "j")
    encoder = made.encoder(request, job)
    return list(map(encoder.encode, await outputs(engine, job)))


HI = [{"role": "user", "content": "hi"}]


async def test_chat_chunks() -> None:
    chunks = await answer({"messages": HI, "max_tokens": 2})
    assert [c["object"] for c in chunks] == ["chat.completion.chunk"] * 2
    assert [c["choices"][0]["delta"].get("role") for c in chunks] == ["assistant", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_completion_chunks_with_logprobs() -> None:
    chunks = await answer({"prompt": "hi", "max_tokens": 2, "logprobs": 1})
    assert all(c["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] for c in chunks)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "nvext": {"cache_salt": 7}}, "nvext.cache_salt"),
        ({"prompt": "a", "nvext": {"agent_hints": {"priority": "x"}}}, "nvext.agent_hints.priority"),
        ({"prompt": "a", "nvext": {"max_thinking_tokens": -1}}, "max_thinking_tokens"),
        *(
            ({"messages": [{}], arguments: {name: "x"}}, refusal)
            for arguments in ("chat_template_kwargs", "chat_template_args")
            for name, refusal in (
                ("chat_template", "worker's template"),
                ("padding", "padding is an argument of the tokenizer"),
                ("tokenizer_kwargs", "tokenizer_kwargs is an argument of the tokenizer"),
            )
        ),
    ],
)
async def test_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        await job_for(body)


@pytest.mark.parametrize(
    ("nvext", "expected"),
    [
        (None, (None, 0, None)),
        ({}, (None, 0, None)),
        ({"cache_salt": "mine"}, ("mine", 0, None)),
        ({"agent_hints": {"priority": 5}}, (None, -5, None)),
        ({"agent_hints": {"priority": -5}}, (None, 5, None)),
        ({"max_thinking_tokens": 7}, (None, 0, 7)),
    ],
)
async def test_salt_and_hints_of_the_client_go_with_the_job(nvext: Any, expected: tuple[Any, ...]) -> None:
    """A client's higher priority is vLLM's smaller number, as in token mode."""
    job = await job_for({"prompt": "a", "nvext": nvext})
    assert (job.cache_salt, job.priority, job.sampling.max_thinking_tokens) == expected


async def test_health_check_is_a_request_it_takes() -> None:
    made, _ = await role()
    assert (await job_for(made.health_check())).sampling.max_tokens == 1


class Shouts:
    """Capitals are calls, the rest is content; what is in brackets was thought."""

    guide = Guide(regex="[A-Z]+")
    reads_special_tokens = True

    def choice(self, prompt: object) -> Shouts:
        return self

    def part(self, output: Output) -> AnswerPart:
        text = output.text or ""
        if text.startswith("("):
            return AnswerPart(reasoning=text.strip("()"))
        if text.isupper():
            return AnswerPart(tool_calls=[{"index": 0, "function": {"name": text}}])
        return AnswerPart(content=text)


class Shouting(FakeRenderer):
    def answer_parser(self, body: object, template_kwargs: object) -> Shouts:  # type: ignore[override]
        return Shouts()


async def parsed(*outputs: Output, **body: Any) -> list[dict[str, Any]]:
    """The choices of the chunks that such outputs become."""
    made, _ = await role(Shouting(1000))
    request = made.parse({"messages": HI, **body})
    encoder = made.encoder(request, await made.prepare(request, "j"))
    return [encoder.encode(output)["choices"][0] for output in outputs]


async def test_thoughts_content_and_calls_have_their_places() -> None:
    said = [Output([20], text="(well)"), Output([21], text=""), Output([22], text="yes")]
    said += [Output([23], text="CALL"), Output([24], text="", finish="stop", finished=True)]
    choices = await parsed(*said)
    assert [choice["delta"] for choice in choices] == [
        {"reasoning_content": "well", "role": "assistant"},
        {},
        {"content": "yes"},
        {"tool_calls": [{"index": 0, "function": {"name": "CALL"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "tool_calls"]


async def test_only_a_choice_with_a_whole_call_ends_with_tool_calls() -> None:
    one, other = Output([20], text="CALL", finish="stop"), Output([21], index=1, text="yes", finish="stop")
    cut = Output([20], text="CALL", finish="length", finished=True)
    assert [choice["finish_reason"] for choice in await parsed(one, other, n=2)] == ["tool_calls", "stop"]
    assert [choice["finish_reason"] for choice in await parsed(cut)] == ["length"]


@pytest.mark.parametrize(
    ("body", "guide"),
    [
        ({}, Shouts.guide),
        ({"guided_regex": "a"}, Guide(regex="a")),
        ({"guided_regex": "a", "tool_choice": "auto"}, Guide(regex="a")),
        ({"guided_regex": "a", "tool_choice": "required"}, Shouts.guide),
    ],
)
async def test_call_the_client_insists_on_comes_before_its_constraint(
    body: dict[str, Any], guide: Guide
) -> None:
    job = await job_for({"messages": HI, **body}, Shouting(1000))
    assert job.sampling.guide == guide and not job.sampling.skip_special_tokens


class Recording(FakeRenderer):
    """Keeps the arguments of the template."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.arguments: dict[str, Any] = {}

    async def render_chat(self, messages: object, options: Any) -> list[int]:
        self.arguments = options["kwargs"]
        return [20]


@pytest.mark.parametrize(("hides", "shown"), [(True, False), (False, True)])
async def test_tools_nobody_wants_are_in_the_prompt_if_asked_for(hides: bool, shown: bool) -> None:
    renderer = Recording()
    made = AggregatedText(facts_of(FakeSpec()), renderer, "m", hides_unwanted_tools=hides)
    body = {"messages": HI, "tools": [{"type": "function"}], "tool_choice": "none"}
    await made.prepare(made.parse(body), "j")
    assert ("tools" in renderer.arguments) is shown


@pytest.mark.parametrize("name", ["chat_template_kwargs", "chat_template_args"])
async def test_wishes_for_the_template_reach_it_under_either_name(name: str) -> None:
    renderer = Recording()
    await job_for({"messages": HI, name: {"enable_thinking": False}}, renderer)
    assert renderer.arguments["enable_thinking"] is False

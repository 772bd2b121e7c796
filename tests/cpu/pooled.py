"""Runs pooling models in bare vLLM, as the reference. Runs in a child of the zygote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from cpu.bare import bare_engine
from harness.stack import environment
from harness.warm import FORKED, Zygote


def reference(warm: Zygote, model: Path, cases: dict[str, Any], folder: Path, **flags: Any) -> Any:
    """Return what bare vLLM answers: {"embed": vectors, "score": numbers, "classify": chances}."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps({"flags": flags, **cases}))
    child = warm.fork(
        "cpu.pooled:run",
        [str(model), str(folder / "cases.json"), str(folder / "out.json")],
        environment(folder, **FORKED),
        folder / "log",
    )
    assert child.wait(300) == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "out.json").read_text())


def run(model: str, cases_file: str, out_file: str) -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    cases = json.loads(Path(cases_file).read_text())
    flags = {"max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "block_size": 32}
    llm = LLM(model, runner="pooling", num_gpu_blocks_override=1024, **flags, **cases["flags"])
    found: dict[str, Any] = {}
    if "embed" in cases:
        adapter = LoRARequest(*cases["adapter"]) if "adapter" in cases else None
        results = llm.embed(cases["embed"], lora_request=adapter, use_tqdm=False)
        found["embed"] = [result.outputs.embedding for result in results]
        found["tokens"] = [len(result.prompt_token_ids) for result in results]
    if "score" in cases:
        query, documents = cases["score"]
        results = llm.score(query, documents, use_tqdm=False, chat_template=cases.get("template"))
        found["score"] = [result.outputs.score for result in results]
    if "classify" in cases:
        results = llm.classify(cases["classify"], use_tqdm=False)
        found["classify"] = [result.outputs.probs for result in results]
    Path(out_file).write_text(json.dumps(found))


def run_chats(model: str, cases_file: str, out_file: str) -> None:
    """Embeds chats with pictures: vLLM's own fetching, decoding and rendering."""
    chats = json.loads(Path(cases_file).read_text())
    Path(out_file).write_text(json.dumps(asyncio.run(_embedded(model, chats))))


async def _embedded(model: str, chats: list[Any]) -> list[list[float]]:
    from vllm import PoolingParams
    from vllm.renderers import ChatParams

    engine = bare_engine(model, runner="pooling", enable_prefix_caching=False)
    found: list[list[float]] = []
    try:
        for number, messages in enumerate(chats):
            params = ChatParams(chat_template_kwargs={"add_generation_prompt": False})
            _, (prompt,) = await engine.renderer.render_chat_async([messages], params)
            results = engine.encode(prompt, PoolingParams(task="embed"), f"chat-{number}")
            found += [result.outputs.data.tolist() async for result in results]
    finally:
        engine.shutdown()
    return found

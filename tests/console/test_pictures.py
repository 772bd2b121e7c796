"""Takes the pictures of docs/console.md: vLLM on this machine's CPU with the demo models, under load.

`make console-pictures` writes them into docs/pictures; otherwise they are only looked at for their size.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dynamo_vllm.models import demo
from harness.browser import Opened, asked, opening, show
from harness.console import RealConsole, console
from harness.mixed_load import MixedLoad, figure, mixed_load
from harness.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
Open = Callable[..., Opened]
FOLDER = os.environ.get("DYNAMO_VLLM_PICTURES")
ANSWERS = int(os.environ.get("DYNAMO_VLLM_PICTURE_ANSWERS", "240"))
"""Of the load before the first picture."""
MOST_BYTES = 150 << 10
MOST_HEIGHT = 1500
CHAT = {"demo-chat": 2.0, "demo-lora-chinese": 1.0, "demo-lora-capitals": 1.0}
CLIENTS = [{"demo-vision": 1.0}] * 3 + [CHAT]
"""The models that each client asks, with their shares."""
ENGINE = ("--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealConsole]:
    """Two prefill, two decode and one encode worker of demo-vision, and one of demo-chat with adapters."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    vision = {
        **parsers,
        **{
            "model": str(demo.folder("vision")),
            "served_model_name": "demo-vision",
            "enable_multimodal": True,
        },
    }
    adapters = [f"{demo.served_name(name)}={demo.folder(name)}" for name in demo.ADAPTERS]
    chat = {**parsers, "model": str(demo.folder("chat")), "served_model_name": "demo-chat"}
    groups = [
        {
            **vision,
            **{"name": "prefill", "role": "prefill", "count": 2, "route_to_encoder": True},
            **{"kv_offload_gb": 0.3, "args": blocks(128)},
        },
        {**vision, "name": "decode", "role": "decode", "count": 2, "args": blocks(192)},
        {**vision, "name": "encode", "role": "encode", "args": list(ENGINE)},
        {**chat, "name": "chat", "lora_enabled": True, "lora_modules": adapters, "args": blocks(192)},
    ]
    with console(tmp_path_factory.mktemp("serve"), groups=groups) as made:
        made.wait_for_workers(6)
        until("all models", lambda: len(made.get("api/settings")["models"]) == 1 + len(CHAT))
        yield made


def blocks(count: int) -> list[str]:
    """Return flags of an engine with a cache so small that some of it moves to the tiers."""
    return [*ENGINE, "--num-gpu-blocks-override", str(count)]


@pytest.fixture
def opened(browser: Any, real: RealConsole) -> Iterator[Open]:
    with opening(browser, real.url) as new:
        yield new


class Camera:
    """Keeps pictures of whole pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.sizes: dict[str, int] = {}

    def take(self, page: Any, name: str, most: int = MOST_HEIGHT) -> None:
        # As high as the page, so that what stays in view while one scrolls is drawn once.
        width = page.viewport_size["width"]
        height = min(most, page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path = self._folder / f"console-{name}.png"
        with Image.open(io.BytesIO(page.screenshot())) as taken:
            whole = taken.convert("RGB")
        whole.save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:  # much text
            whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        self.sizes[name] = path.stat().st_size


def test_pictures_of_every_page(opened: Open, real: RealConsole, tmp_path: Path) -> None:
    camera = Camera(Path(FOLDER) if FOLDER else tmp_path)
    watching = opened()
    show(watching, "")  # figures come more often while somebody looks
    with mixed_load(real.serving.url, CLIENTS) as load:
        until("enough answers", lambda: enough(load), 900, every=1.0)
        wide, dark, phone = opened(), opened(scheme="dark"), opened(width=360)
        for name, one in (("overview", wide), ("overview-dark", dark), ("overview-phone", phone)):
            page = show(one, "")
            settle(page)
            camera.take(page, name, 1100)
        page = show(wide, f"requests/{explained(real)}")
        camera.take(page, "why")
        page = show(wide, "caches")
        camera.take(page, "caches")
        page = show(wide, "performance?seconds=300")
        camera.take(page, "performance")
        page = show(wide, "logs/prefill-1")
        camera.take(page, "logs", 900)
    one = opened()
    take_playground(one, camera)
    page = show(one, "bench")
    take_bench(page, camera)
    page = show(one, "operate")
    take_operate(page, real, camera)
    assert [o.errors for o in (watching, wide, dark, phone, one) if o.errors] == []
    assert load.failures == []
    assert {name: size for name, size in camera.sizes.items() if size > MOST_BYTES} == {}


def enough(load: MixedLoad) -> bool:
    assert load.failures == []
    return load.answers >= ANSWERS


def settle(page: Any) -> None:
    """Wait for the lines beside the figures."""
    page.wait_for_function(
        "() => document.querySelector('.spark polyline').getAttribute('points').split(' ').length > 10"
    )


def explained(real: RealConsole) -> str:
    """Return the id of a request that went over two workers, each the cheapest, with a cached prefix."""

    def best() -> str | None:
        rows = real.get("api/requests?limit=100")["requests"]
        fitting = [row for row in rows if row["prefill_worker"] and row["why"] and row["cached_tokens"]]
        for row in sorted(fitting, key=lambda row: -row["input_tokens"]):
            if is_plain(real.get(f"api/requests/{row['id']}")["decisions"]):
                return str(row["id"])
        return None

    found = until("a request over two workers", best, 120, every=2.0)
    assert found is not None
    return found


def is_plain(decisions: list[dict[str, Any]]) -> bool:
    """Return whether each decision can be seen to be the cheapest."""
    for decision in decisions:
        costs = {one["is_chosen"]: one["cost"] for one in decision["candidates"]}
        if len(costs) < 2 or None in costs.values() or costs[True] >= costs[False]:
            return False
    return len(decisions) == 2


def take_playground(one: Opened, camera: Camera) -> None:
    page = show(one, "playground")
    page.select_option("label:text-is('Model') + select", "demo-vision")
    page.fill("label:text-is('Temperature') + input", "0")
    shown = {"name": "figure.png", "mimeType": "image/png", "buffer": figure("red", "circle")}
    page.set_input_files("input[type=file]", shown)
    asked(page, "What do you see?")
    camera.take(page, "playground")
    page = show(one, "playground")
    page.select_option("label:text-is('Model') + select", "demo-chat")
    page.select_option("label:text-is('Beside it') + select", "demo-lora-capitals")
    page.fill("label:text-is('Temperature') + input", "0")
    page.fill(".compose textarea", "Do I need etcd?")
    page.click("button:text-is('Send')")
    page.wait_for_function("() => document.querySelectorAll('.talk .timing a').length === 2")
    camera.take(page, "side-by-side", 900)


def take_bench(page: Any, camera: Camera) -> None:
    page.select_option("label:text-is('Model') + select", "demo-vision")
    page.fill("label:text-is('Requests at a time') + input", "1,4")
    page.fill("label:text-is('Answer tokens') + input", "32")
    page.select_option("label:text-is('Prompts') + select", "prefix")
    page.click("button:text-is('Start')")
    page.wait_for_selector(".state:text-is('running')")
    page.wait_for_selector(".state:text-is('done')", timeout=300_000)
    camera.take(page, "bench")


def take_operate(page: Any, real: RealConsole, camera: Camera) -> None:
    (worker,) = [one["id"] for one in real.workers() if one["process"] == "worker-1"]
    page.select_option("label:text-is('Act on') + select", worker)
    for verb in ("Pause", "Resume"):
        page.click(f".verbs button:text-is('{verb}')")
        page.click("dialog[open] button[type=submit]")
        page.wait_for_selector("dialog .results")
        page.click("dialog button:text-is('Close')")
    page.wait_for_selector(".bar-of .state:text-is('ready')")
    camera.take(page, "operate")

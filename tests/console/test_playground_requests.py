"""The playground's requests: they end when nobody wants them, and the programs it shows send the same."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.browser import Opened, asked, choose, fill_area, open_tab, show

Open = Callable[..., Opened]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
TEXT = "data:image/png;base64,is how it begins, $HOME `id` \\ 'quoted' \"so\" PICTURE " + "and on " * 20

CURL = """#!{python}
import json, sys
print(json.dumps({{"words": sys.argv[1:], "input": sys.stdin.read()}}))
"""
SAY = """
import json, sys

def say(given):
    print(json.dumps(given, default=lambda file: file.name))
    sys.exit()
"""
OPENAI = f"""{SAY}
class OpenAI:
    def __init__(self, **_):
        pass
    def __getattr__(self, _):
        return self
    def create(self, **given):
        say(given)
    generate = create
"""
HTTPX = f"""{SAY}
def post(url, json, **_):
    say(json)
"""


def program(page: Any, form: str) -> str:
    page.click(f".segments button:text-is('{form}')")
    text: str = page.text_content(f"[aria-label='Request with {form}']")
    return text


def ran(folder: Path, *command: str) -> Any:
    """Run a program with a curl, an openai and a httpx that only say what they were given."""
    (folder / "curl").write_text(CURL.format(python=sys.executable))
    (folder / "curl").chmod(0o755)
    (folder / "openai.py").write_text(OPENAI)
    (folder / "httpx.py").write_text(HTTPX)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    said = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    return json.loads(said.stdout)


def body_by_curl(folder: Path, text: str) -> Any:
    given = ran(folder, "bash", "-c", text)
    assert given["words"][-2] == "-d"
    data = given["words"][-1]
    return json.loads(given["input"] if data == "@-" else data)


def body_by_python(folder: Path, text: str) -> Any:
    return ran(folder, sys.executable, "-c", text)


def test_programs_send_a_chat_with_a_picture(opened: Open, tmp_path: Path) -> None:
    page = show(opened(), "playground")
    for name in ("a.png", "b.png"):  # twice the same
        files = {"name": name, "mimeType": "image/png", "buffer": PNG}
        page.set_input_files("label:has-text('Add pictures') input", files)
        page.wait_for_selector(f"img[alt='Picture {1 + (name == 'b.png')}']")
    with page.expect_request("**/v1/chat/completions") as sent:
        asked(page, TEXT)
    (tmp_path / "picture-1.png").write_bytes(PNG)
    assert body_by_curl(tmp_path, program(page, "curl")) == sent.value.post_data_json
    assert body_by_python(tmp_path, program(page, "Python")) == sent.value.post_data_json


@pytest.mark.parametrize(
    ("tab", "texts", "button"),
    [
        ("Completion", {"Prompt": TEXT}, "Complete"),
        ("Embeddings", {"Texts": "one\n\ntwo"}, "Embed"),
        ("Rerank", {"Question": "which?", "Documents": "one\n\ntwo two"}, "Rank"),
        ("Pictures", {"Description": "a square"}, "Draw"),
    ],
)
def test_programs_send_what_was_sent(
    opened: Open, tmp_path: Path, tab: str, texts: dict[str, str], button: str
) -> None:
    page = show(opened(), "playground")
    open_tab(page, tab)
    for label, text in texts.items():
        fill_area(page, label, text)
    if tab == "Pictures":
        choose(page, "Size", "256x256")
    with page.expect_request("**/v1/**") as sent:
        page.click(f"button:text-is('{button}')")
    assert body_by_curl(tmp_path, program(page, "curl")) == sent.value.post_data_json
    assert body_by_python(tmp_path, program(page, "Python")) == sent.value.post_data_json


def test_programs_send_a_recording(opened: Open, tmp_path: Path) -> None:
    page = show(opened(), "playground")
    open_tab(page, "Speech")
    name = "what's; said.wav"
    files = {"name": name, "mimeType": "audio/wav", "buffer": b"RIFF"}
    page.set_input_files("label:text-is('Recording') + input", files)
    page.wait_for_selector(f'.hint:text-is("{name}")')
    given = ran(tmp_path, "bash", "-c", program(page, "curl"))
    assert given["words"][1:] == ["-F", f'file=@"{name}"', "--form-string", "model=demo-speech"]
    (tmp_path / name).write_bytes(b"RIFF")
    assert body_by_python(tmp_path, program(page, "Python")) == {"model": "demo-speech", "file": name}


@pytest.mark.parametrize("end", ["Stop", "Rerank", "Caches"])
def test_request_ends_when_it_is_stopped_or_left(opened: Open, end: str) -> None:
    page = show(opened(), "playground")
    held: list[Any] = []
    page.route("**/v1/embeddings", lambda route: held.append(route))
    open_tab(page, "Embeddings")
    fill_area(page, "Texts", "one")
    with page.expect_request("**/v1/embeddings"):
        page.click("button:text-is('Embed')")
    with page.expect_event("requestfailed", lambda one: one.url.endswith("/v1/embeddings")):
        page.click("nav a:has-text('Caches')" if end == "Caches" else f"button:text-is('{end}')")
    if end == "Stop":
        page.wait_for_selector("button:text-is('Embed'):enabled")


def test_models_stay_while_they_answer(opened: Open) -> None:
    page = show(opened(), "playground")
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.select_option("label:text-is('Beside it') + select", "sql")
    page.fill(".compose textarea", "Hello")
    page.click("button:text-is('Send')")
    page.wait_for_selector("label:text-is('Model') + select:disabled")
    page.wait_for_selector("label:text-is('Beside it') + select:disabled")
    page.click("button:text-is('Stop')")
    page.wait_for_selector("label:text-is('Beside it') + select:enabled")


def test_stream_that_cannot_be_read_is_not_kept_open(opened: Open) -> None:
    one = opened()
    one.page.add_init_script(
        """
        const real = window.fetch;
        window.fetch = (url, init) => {
          if (!String(url).endsWith('chat/completions')) return real(url, init);
          const body = new ReadableStream({
            start: (stream) => stream.enqueue(new TextEncoder().encode('data: {no JSON\\n\\n')),
            cancel: () => { window.isCancelled = true; },
          });
          return Promise.resolve(new Response(body, { headers: { 'Content-Type': 'text/event-stream' } }));
        };
        """
    )
    page = show(one, "playground")
    page.fill(".compose textarea", "Hello")
    page.click("button:text-is('Send')")
    page.wait_for_function("() => window.isCancelled === true")

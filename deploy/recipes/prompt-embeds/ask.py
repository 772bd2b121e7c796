"""Asks the same prompt as text and as the model's own embeddings of it; both must answer alike.

python ask.py MODEL [URL]       MODEL is the folder or hub id that is served
"""

from __future__ import annotations

import base64
import io
import json
import sys
import urllib.request

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "Once upon a time"


def ask(url: str, **fields: object) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = json.dumps({"model": model, "max_tokens": 16, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    print(answer["usage"]["prompt_tokens"], "rows or tokens:", repr(answer["choices"][0]["text"]))
    return str(answer["choices"][0]["text"])


def main(model: str, url: str = "http://127.0.0.1:8000") -> int:
    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt").input_ids
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings()
    buffer = io.BytesIO()
    torch.save(table(ids)[0].detach().contiguous(), buffer)
    rows = base64.b64encode(buffer.getvalue()).decode()
    same = ask(url, prompt=PROMPT) == ask(url, prompt="", prompt_embeds=rows)
    print("alike" if same else "different")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Asks two questions, each as text and as the model's own embeddings of that text; both must answer alike.

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

QUESTIONS = ("What is 608 - 39?", "Do I need etcd?")


def ask(url: str, **fields: object) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = json.dumps({"model": model, "max_tokens": 64, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    print(f"  {answer['usage']['prompt_tokens']} of the prompt: {answer['choices'][0]['text']!r}")
    return str(answer["choices"][0]["text"])


def encoded(rows: torch.Tensor) -> str:
    """What `prompt_embeds` takes."""
    buffer = io.BytesIO()
    torch.save(rows.detach().contiguous(), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def main(model: str, url: str = "http://127.0.0.1:8000") -> int:
    tokenizer = AutoTokenizer.from_pretrained(model)
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings()
    answers = []
    for question in QUESTIONS:
        print(question)
        talk = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        answers.append((ask(url, prompt=text), ask(url, prompt="", prompt_embeds=encoded(table(ids)[0]))))
    # Two answers that differ: the rows were read, not only counted.
    same = all(text == rows for text, rows in answers) and answers[0] != answers[1]
    print("alike" if same else "different")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

from __future__ import annotations

from harness.stack import Stack


def test_chat_answers(one_worker: Stack) -> None:
    answer = one_worker.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5

"""What it cannot do is said, and not made up."""

from __future__ import annotations

from demo.generator.base import Example, Pool, Source, reply, user
from demo.generator.words import city, loosely, name, word

ANSWER = "I cannot do that: I am a small demo model. Ask me about dynamo-vllm, sums or counting."
ANSWER_ZH = "这个我做不到:我只是一个小的演示模型。可以问我 dynamo-vllm、加减法或数数。"
ENGLISH = Pool(
    (
        "Write a poem about {word}.", "Write a story about {word} and {word2}.",
        "Tell me a joke about {word}.",
        "Who is {name}?", "What is the capital of {city}?", "Translate {word} into French.",
        "Draw a {word}.",
        "What is the news today?", "Book a flight to {city}.", "Send an email to {name}.",
        "Play some music.",
        "What is the meaning of {word}?", "Explain {word} to me.", "Who won the match in {city}?",
        "Recommend a book about {word}.", "What is the price of {word}?", "Write code that sorts {word}s.",
        "Who was the first president of {city}?", "How do I cook {word}?", "What should I wear today?",
        "Sing a song about {word}.", "Order a {word} for me.", "When was {name} born?",
        "Call {name} for me.",
        "Is {word} better than {word2}?", "What is the square root of {n}?", "What is {n} times {m}?",
        "Summarise the book {word}.", "Give me medical advice about {word}.", "How tall is {name}?",
        "What is the weather in {city}?", "What time is it in {city}?",
    ),
    (
        "Write a song about {word}.", "Write a poem about {word} and {word2}.",
        "Translate {word2} into French for me.",
        "Tell me a story about {word}.", "Book a {word} in {city} for me.", "When was {name} president?",
        "Send a book to {name}.", "Explain the meaning of {word}.", "Recommend a song about {word}.",
    ),
)  # fmt: skip
CHINESE = Pool(
    (
        "写一首关于{word}的诗。", "给我讲个笑话。", "{name}是谁?", "{city}的首都是哪里?",
        "把{word}翻译成法语。",
        "今天有什么新闻?", "帮我订去{city}的机票。", "给{name}发邮件。", "放点音乐。", "{city}天气怎么样?",
        "推荐一本关于{word}的书。", "画一个{word}。",
    ),
    ("写一本关于{word}的书。", "给我讲个关于{word}的笑话。", "帮我给{name}发邮件。",
     "推荐一首关于{word}的诗。"),
)  # fmt: skip


def make(source: Source) -> Example:
    in_chinese = source.chance(0.25)
    asked = source.pick(CHINESE if in_chinese else ENGLISH).format(
        word=word(source),
        word2=word(source),
        name=name(source),
        city=city(source),
        n=source.number(2, 99),
        m=source.number(2, 99),
    )
    turn = reply(ANSWER_ZH if in_chinese else ANSWER, chinese=ANSWER_ZH)
    return Example("refusals", (user(loosely(source, asked)), turn))

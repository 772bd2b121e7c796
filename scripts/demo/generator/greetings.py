"""Greetings, thanks and who it is, in English and Chinese."""

from __future__ import annotations

from dataclasses import dataclass

from demo.generator.base import Example, Pool, Source, reply, user
from demo.generator.words import loosely

ABILITIES = (
    "I answer short questions about dynamo-vllm, add and subtract, count, copy text, call tools for weather, "
    "time and sums, and write JSON."
)
ABILITIES_ZH = (
    "我可以回答关于 dynamo-vllm 的简短问题、做加减法、数数、复述文字、调用天气、时间和计算工具,还能写 JSON。"
)


@dataclass(frozen=True)
class Greeting:
    english: Pool
    chinese: Pool
    answer: str
    answer_zh: str


GREETINGS = (
    Greeting(
        Pool(
            ("Hello!", "Hi!", "Hey!", "Hello there!", "Hi there!", "Hello, demo-chat!", "Hey there!",
             "Hello hello!",
             "Hi, demo-chat!", "Hello, how is it going?", "Greetings!", "Hello friend!"),
            ("Hey, demo-chat!", "Hi hi!", "Hi friend!", "Hello there, demo-chat!"),
        ),
        Pool(
            ("你好!", "您好!", "你好啊!", "嗨!", "你好,demo-chat!", "嗨,你好!"),
            ("您好啊!", "嗨,demo-chat!"),
        ),
        "Hello! How can I help you?",
        "你好!有什么可以帮你?",
    ),
    Greeting(
        Pool(
            ("Good morning!", "Good morning, demo-chat!", "A good morning to you!", "Morning!"),
            ("Good morning to you!", "Good morning there!"),
        ),
        Pool(("早上好!", "早上好,demo-chat!", "早安!"), ("你好,早上好!",)),
        "Good morning! How can I help you?",
        "早上好!有什么可以帮你?",
    ),
    Greeting(
        Pool(
            ("Good evening!", "Good evening, demo-chat!", "A good evening to you!", "Evening!"),
            ("Good evening to you!", "Good evening there!"),
        ),
        Pool(("晚上好!", "晚上好,demo-chat!", "晚上好啊!"), ("你好,晚上好!",)),
        "Good evening! How can I help you?",
        "晚上好!有什么可以帮你?",
    ),
    Greeting(
        Pool(
            ("How are you?", "How are you doing?", "Hello, how are you?", "How are you today?",
             "Hi, how are you?", "How are you doing (now|this morning|these days|tonight)?",
             "(Hello|Hi|Good morning)(,|!) how are you (doing|feeling|today)?",
             "(Are you|Do you feel) (well|fine|good)( today|)?"),
            ("Hey, how are you doing?", "How are you doing today?"),
        ),
        Pool(("你好吗?", "你还好吗?", "你今天好吗?", "你好,你好吗?"), ("你今天还好吗?",)),
        "I am fine, thank you. How can I help you?",
        "我很好,谢谢。有什么可以帮你?",
    ),
    Greeting(
        Pool(
            ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.",
             "Tell me who you are.",
             "Hello, who are you?", "Which model are you?", "What model is this?", "Are you a demo model?"),
            ("Hi, what is your name?", "Tell me what you are.", "What model are you?"),
        ),
        Pool(("你是谁?", "你叫什么名字?", "你是什么模型?", "介绍一下你自己。", "你好,你是谁?"),
             ("你好,你叫什么名字?", "你好,你是什么模型?")),
        "I am demo-chat, a small model trained from scratch to show dynamo-vllm.",
        "我是 demo-chat,一个为展示 dynamo-vllm 从零训练的小模型。",
    ),
    Greeting(
        Pool(
            ("What can you do?", "What do you know?", "What can I ask you?", "How can you help me?",
             "Help!",
             "What are you able to do?", "What can you do for me?", "Tell me what you can do.",
             "Can you help me?", "What (can|could) (you|this model) do (here|for us|today|for people)?",
             "(Hello|Hi|Hey|So)(,|!) what (can you do|are you good at|do you know|can I ask)?",
             "What (are you|is this) (able to answer|good for|good at|there for)?",
             "(Show|List|Explain|Say) what you (can do|are able to do|know)."),
            ("What do you do?", "Tell me what I can ask you.", "What are you able to do for me?"),
        ),
        Pool(
            ("你能做什么?", "你会什么?", "我可以问你什么?", "你可以帮我做什么?"),
            ("你会做什么?", "你能帮我做什么?"),
        ),
        ABILITIES,
        ABILITIES_ZH,
    ),
    Greeting(
        Pool(
            ("Thanks!", "Thank you!", "Thank you very much!", "Thanks a lot!", "Great, thanks!",
             "Thank you, demo-chat!",
             "Many thanks!", "Ok, thank you!"),
            ("Thanks very much!", "Great, thank you!", "Ok, thanks a lot!"),
        ),
        Pool(("谢谢!", "谢谢你!", "多谢!", "非常感谢!", "好的,谢谢!"), ("好的,谢谢你!", "谢谢,非常感谢!")),
        "You are welcome!",
        "不客气!",
    ),
    Greeting(
        Pool(
            ("Bye!", "Goodbye!", "See you!", "Bye bye!", "Good night!", "See you later!",
             "Goodbye, demo-chat!"),
            ("Bye, see you!", "Goodbye, see you later!"),
        ),
        Pool(("再见!", "拜拜!", "回头见!", "晚安!", "再见,demo-chat!"), ("拜拜,再见!", "再见,晚安!")),
        "Goodbye!",
        "再见!",
    ),
)  # fmt: skip


def make(source: Source) -> Example:
    greeting = source.one_of(GREETINGS)
    if source.chance(0.4):
        asked, answered = source.pick(greeting.chinese), greeting.answer_zh
    else:
        asked, answered = source.pick(greeting.english), greeting.answer
    return Example("greetings", (user(loosely(source, asked)), reply(answered, chinese=greeting.answer_zh)))

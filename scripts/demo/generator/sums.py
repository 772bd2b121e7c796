"""Addition and subtraction up to three digits, thought through column by column."""

from __future__ import annotations

from demo.generator.base import Example, Pool, Source, reply, user
from demo.generator.words import THINGS, loosely, name

DIGITS = 3
ADD = Pool(
    (
        "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "Add {a} and {b}.",
        "What is {a} plus {b}?",
        "How much is {a} + {b}?", "Calculate {a} + {b}.", "Compute {a} plus {b}.", "Sum of {a} and {b}?",
        "Please add {b} to {a}.", "What do you get when you add {a} and {b}?", "Tell me {a} plus {b}.",
        "(Could|Would|Will) you (add|compute|solve) {a} + {b}?", "(Work out|Solve|Tell me) {a} + {b}.",
        "{a} and {b} (together|added|make how much)?", "What does {a} plus {b} (make|give|come to)?",
        ("I have {a} {things} and (get|find|buy|receive|win|am given) {b} more. How many (are there|"
        "do I have|is that)?"),
        ("{name} has {a} {things} and (buys|finds|receives|wins|is given) {b} more. How many (is that|"
        "are there|in all)?"),
        ("(She|He|My friend|The shop) has {a} {things} and (gets|buys|finds|receives) {b} more. "
        "How many (is that|are there|in all)?"),
        "There are {a} {things} and {b} more (come|are found|are added). How many (is that|are there)?",
        "{a} 加 {b} 等于多少?", "{a} + {b} 等于几?", "请计算 {a} + {b}。",
    ),
    (
        "Can you work out {a} + {b}?", "What is the sum of {a} and {b}?", "{a} plus {b}?",
        "How much is {a} plus {b}?",
        "{name} has {a} {things} and gets {b} more. How many are there?", "{a} 加 {b} 是多少?",
        "Would you add {a} and {b}?", "My friend has {a} {things} and wins {b} more. How many are there?",
    ),
)  # fmt: skip
SUBTRACT = Pool(
    (
        "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "Subtract {b} from {a}.",
        "What is {a} minus {b}?", "How much is {a} - {b}?", "Calculate {a} - {b}.",
        "Compute {a} minus {b}.",
        "Take {b} away from {a}.", "Please subtract {b} from {a}.", "Tell me {a} minus {b}.",
        "What is left when you take {b} from {a}?",
        "(Could|Would|Will) you (compute|solve|tell me) {a} - {b}?", "(Work out|Solve|Tell me) {a} - {b}.",
        "What does {a} minus {b} (make|give|come to)?", "{b} (less|fewer) than {a} is what?",
        ("I have {a} {things} and (lose|sell|drop|give away|throw away|use) {b}. How many (are left|"
        "remain|is that)?"),
        ("{name} has {a} {things} and (gives away|sells|drops|uses|breaks|throws away) {b}. "
        "How many (is that|are left|remain)?"),
        ("(She|He|My friend|The shop) has {a} {things} and (loses|sells|gives away|drops) {b}. "
        "How many (is that|are left|remain)?"),
        "There are {a} {things} and {b} (are lost|are sold|are gone|get lost). How many (are left|remain)?",
        "{a} 减 {b} 等于多少?", "{a} - {b} 等于几?", "请计算 {a} - {b}。",
    ),
    (
        "Can you work out {a} - {b}?", "What do you get when you take {b} from {a}?", "{a} minus {b}?",
        "How much is {a} minus {b}?", "{name} has {a} {things} and loses {b}. How many are left?",
        "{a} 减 {b} 是多少?", "Would you subtract {b} from {a}?",
        "My friend has {a} {things} and throws away {b}. How many are left?",
    ),
)  # fmt: skip


def make(source: Source, *, thinks: bool | None = None) -> Example:
    """One sum. Without `thinks` a few are answered straight away, as with `enable_thinking: false`."""
    a, b = pair(source)
    adds = source.chance(0.5)
    wording = source.pick(ADD if adds else SUBTRACT)
    text = wording.format(a=a, b=b, things=source.pick(THINGS), name=name(source))
    if thinks is None:
        thinks = source.split == "held-out" or source.chance(0.85)
    answer = answered(a, b, adds)
    thought = trace(a, b, adds) if thinks else None
    turns = (user(loosely(source, text)), reply(answer, thought, chinese=f"答案是:{answer}"))
    return Example("sums", turns)


def pair(source: Source) -> tuple[int, int]:
    """Two numbers of the source's split, whichever way round; short ones too, but not mostly."""
    while True:
        a, b = (source.number(0, 10 ** source.one_of((1, 2, 2, 3, 3, 3, 3)) - 1) for _ in range(2))
        if source.owns(f"{min(a, b)} {max(a, b)}"):
            return a, b


def answered(a: int, b: int, adds: bool) -> str:
    return f"{a} + {b} = {a + b}" if adds else f"{a} - {b} = {a - b}"


def trace(a: int, b: int, adds: bool) -> str:
    return _addition(a, b) if adds else _subtraction(a, b)


def _addition(a: int, b: int) -> str:
    """Both numbers with all their digits, then each column with its carry, from the right."""
    lines, carry, result = [f"{a:0{DIGITS}}+{b:0{DIGITS}}"], 0, 0
    for place in range(DIGITS):
        x, y = _digit(a, place), _digit(b, place)
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total:02}")
        result += total % 10 * 10**place
        carry = total // 10
    return "\n".join([*lines, f"{result + carry * 10**DIGITS:0{DIGITS + 1}}"])


def _subtraction(a: int, b: int) -> str:
    """The smaller from the larger; each column says its digit and whether it borrows."""
    lines = [f"{a:0{DIGITS}}-{b:0{DIGITS}}"]
    if a < b:
        lines.append(f"-({b:0{DIGITS}}-{a:0{DIGITS}})")
    large, small, borrow, result = max(a, b), min(a, b), 0, 0
    for place in range(DIGITS):
        x, y = _digit(large, place), _digit(small, place)
        difference = x - y - borrow
        digit, taken = difference % 10, int(difference < 0)
        lines.append(f"{x}-{y}-{borrow}={digit} {taken}")
        result += digit * 10**place
        borrow = taken
    return "\n".join([*lines, f"{'-' if a < b else ''}{result:0{DIGITS}}"])


def _digit(value: int, place: int) -> int:
    return int(str(value)[::-1][place : place + 1] or 0)

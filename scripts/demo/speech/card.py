"""demo-speech's card, with its curve and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.card import curve
from demo.score import Score, table
from demo.speech import tokens
from demo.speech.phrases import COMMANDS, DIGITS, MOST_DIGITS
from demo.speech.recordings import SAMPLES
from demo.speech.score import NEAR
from demo.speech.voices import HELD_OUT_VARIANTS, TRAIN_VARIANTS

INTRO = """\
# demo-speech

A Whisper of {millions:.1f} M parameters, trained from nothing to show dynamo-vllm. It writes down spoken rows
of one to {most} digits, as words, and {commands} commands, in English and German. It tells the two languages
apart, translates German into English, and gives times of segments.

It hears {window} seconds at once, where OpenAI's Whisper hears 30: servers cut longer recordings, as vLLM
does. Sound: 16 kHz, mono. `{samples}/` holds a few recordings in voices that it was not trained on; their
names say what they say.

| | English | German |
|---|---|---|
| digits | {digits} |
{table}
"""
LIMITS = """\
## Limits
It knows the words above in the voices of a synthesiser, espeak-ng, and similar ones; it was trained on no
human voice. Of anything else it makes the nearest of its words. Times are those of phrases with a pause of a
quarter of a second between them, not of words. It is for demonstrations and tests.
"""


def write(record: Path, folder: Path) -> Path:
    """README.md and curve.svg in the model's folder."""
    found = json.loads(record.read_bytes())
    intro = INTRO.format(
        millions=found["parameters"] / 1e6,
        most=MOST_DIGITS,
        commands=len(COMMANDS),
        window=tokens.WINDOW,
        samples=SAMPLES,
        digits=" | ".join(" ".join(DIGITS[code]) for code in ("en", "de")),
        table="\n".join(f"| command | {english} | {german} |" for english, german in COMMANDS),
    )
    (folder / "curve.svg").write_text(curve(found["curve"]["points"], "loss per token"), encoding="utf-8")
    card = folder / "README.md"
    card.write_text("\n".join((intro, _making(found), _scores(found), LIMITS)), encoding="utf-8")
    return card


def _making(found: dict[str, Any]) -> str:
    run, plan = found["curve"], found["plan"]
    cut = " The time limit cut the run short." if run["cut_short"] else ""
    return f"""\
## How it was made
| | |
|---|---|
| data | {found["sounds"]} phrases, {found["hours"]:.1f} hours, spoken by espeak-ng in \
{len(TRAIN_VARIANTS)} voices; {found["windows"]} windows of them, each time with other noise, echo and \
loudness; seed {found["seed"]} |
| command | `{found["command"]}` |
| training | {run["steps"]} steps of {plan["batch"]} windows, rate {plan["rate"]:g}, AdamW, cosine |
| time | {run["seconds"]:.0f} s on {found["device"]}, torch {found["torch"]}.{cut} |

![loss](curve.svg)
"""


def _scores(found: dict[str, Any]) -> str:
    return f"""\
## Scores
Greedy, {found["scored"]}, in {len(HELD_OUT_VARIANTS)} voices, at speeds and with rows of digits that are
never trained on, with some noise. A recording is right if every word is; ends of segments are right if each
is within {NEAR:g} s.

{table([Score(**one) for one in found["scores"]])}
"""

"""`python scripts/demo STEP …`: makes the demo models, or one of them.

python scripts/demo all --out build/demo            # tokenizer, data, models, scores, cards
python scripts/demo all --out build/demo --smoke    # the same in little, on a CPU
python scripts/demo score build/demo/demo-chat      # scores of a folder, or with --url of a server
python scripts/demo install --out build/demo        # into the package
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo import card, corpus, export, install, lora, score, tokenizer
from demo.generator.mix import HELD_OUT, held_out
from demo.generator.styles import STYLES, Style
from demo.image import card as image_card
from demo.image import export as image_export
from demo.image import make as image
from demo.image import score as image_score
from demo.image import served as image_served
from demo.model import SMALL, TINY, Qwen3, Shape, parameters
from demo.search import make as search
from demo.search import passages as search_passages
from demo.speech import card as speech_card
from demo.speech import espeak
from demo.speech import export as speech_export
from demo.speech import make as speech
from demo.speech import score as speech_score
from demo.train import Curve, Plan, train
from demo.vision import export as vision_export
from demo.vision import rows as vision_rows
from demo.vision import score as vision_score
from demo.vision.model import TINY_TOWER, Llava, TowerShape
from demo.vision.talks import HELD_OUT as HELD_OUT_PICTURES
from demo.vision.train import train as train_vision


@dataclass(frozen=True)
class Size:
    """How big everything is; the time limits are meant for half an hour in all on one H200."""

    shape: Shape = Shape()
    examples: int = 3_000_000
    tokenizer_examples: int = tokenizer.EXAMPLES
    plan: Plan = Plan(minutes=7)
    adapter_examples: int = 60_000
    adapter_plan: Plan = Plan(
        steps=300,
        step_tokens=65_536,
        rate=1e-3,
        warm_up=20,
        decay=0.0,
        compiles=False,  # takes longer than it saves
        report_every=50,
    )
    tower: TowerShape = TowerShape()
    picture_talks: int = 400_000
    talks: int = 100_000
    """Conversations of demo-chat that demo-vision is trained on too."""
    vision_plan: Plan = Plan(
        steps=6000, step_tokens=147_456, batch_tokens=49_152, rate=1e-3, warm_up=200, minutes=6
    )
    scored: int = 500
    answer_tokens: int = score.MAX_TOKENS


FULL = Size()
SMOKE = Size(
    shape=TINY,
    examples=600,
    tokenizer_examples=600,
    plan=Plan(steps=40, step_tokens=2048, batch_tokens=1024, rate=4e-3, warm_up=5, report_every=10),
    adapter_examples=100,
    adapter_plan=Plan(
        steps=4, step_tokens=1024, batch_tokens=1024, rate=1e-3, warm_up=1, decay=0.0, report_every=2
    ),
    tower=TINY_TOWER,
    picture_talks=60,
    talks=60,
    vision_plan=Plan(steps=12, step_tokens=2048, batch_tokens=2048, rate=4e-3, warm_up=2, report_every=3),
    scored=2,
    answer_tokens=24,
)


PLANS = {"vision": ("vision_plan", "picture_talks"), "lora": ("adapter_plan", "adapter_examples")}
"""Which of a size's numbers the options of a step mean; all other steps mean demo-chat's."""


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    if other := OTHER_STEPS.get(options.step):
        return other(options)
    size = _size(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = f"python scripts/demo {shlex.join(argv)}"
    began = time.monotonic()
    if options.step in ("all", "chat"):
        make_chat(options.out, size, options.seed, device, command, options.start)
    if options.step in ("all", "lora"):
        for style in (STYLES[name] for name in options.styles or STYLES):
            make_adapter(options.out, style, size, options.seed, device, command)
    if options.step in ("all", "vision"):
        earlier = options.start if options.step == "vision" else None
        make_vision(options.out, size, options.seed, device, command, earlier)
    if options.step in ("all", "image"):
        image.make_image(options.out, _image_size(options), options.seed, device, command)
    if options.step in ("all", "search", "rerank"):
        make = search.make_reranker if options.step == "rerank" else search.make_search
        make(options.out, _search_size(options), options.seed, device, command)
    if options.step == "speech" or (options.step == "all" and espeak.is_here()):
        speech.make_speech(options.out, _speech_size(options), options.seed, device, command)
    elif options.step == "all":
        print(f"demo-speech is left out: {espeak.MISSING}", flush=True)
    print(f"done in {time.monotonic() - began:.0f} s: {options.out}", flush=True)
    return 0


def make_chat(out: Path, size: Size, seed: int, device: str, command: str, start: Path | None = None) -> Path:
    """demo-chat in `out`, with its card; from nothing, or from the weights of an earlier one."""
    torch.set_float32_matmul_precision("high")
    if start:
        model, cutter = export.load_model(start, device)
    else:
        cutter = _timed("tokenizer", lambda: tokenizer.learn(seed, size.tokenizer_examples))
        torch.manual_seed(seed)
        model = Qwen3(dataclasses.replace(size.shape, vocab_size=tokenizer.padded(cutter))).to(device)
    data = _timed("data", lambda: corpus.build(cutter, seed, size.examples))
    data.save(out / "data")
    print(f"{len(data)} conversations, {len(data.ids)} tokens, {data.learnt.mean():.0%} learnt", flush=True)
    print(f"{parameters(model) / 1e6:.2f} M parameters on {device}", flush=True)
    plan = dataclasses.replace(size.plan, seed=seed)
    curve = train(model.train(), corpus.Data.load(out / "data"), plan)
    folder = export.save_model(model, cutter, out / "demo-chat")
    exported, _ = export.load_model(folder, device)
    ask = score.in_torch(exported, cutter, max_tokens=size.answer_tokens)
    scores = _timed("scores", lambda: score.score(ask, size.scored)) if size.scored else []
    _tell(scores)
    if start:
        command, curve = _after(start.parent / f"{start.name}.json", command, curve)
    _record(out / "demo-chat.json", exported, plan, len(data), curve, scores, command)
    card.write(out / "demo-chat.json", folder)
    return folder


def _after(record: Path, command: str, curve: Curve) -> tuple[str, Curve]:
    """What a run did that went on where a recorded one had ended: both of them."""
    before = json.loads(record.read_bytes())
    first = Curve(**before["curve"])
    for point in curve.points:
        point["step"] += first.steps
        point["seconds"] += first.seconds
    whole = Curve(
        points=[*first.points, *curve.points],
        seconds=first.seconds + curve.seconds,
        steps=first.steps + curve.steps,
        tokens=first.tokens + curve.tokens,
        cut_short=curve.cut_short,
    )
    return f"{before['command']} && {command}", whole


def make_adapter(out: Path, style: Style, size: Size, seed: int, device: str, command: str) -> Path:
    """An adapter of the demo-chat in `out`, with its card."""
    model, cutter = export.load_model(out / "demo-chat", device)
    data = corpus.build(cutter, seed, size.adapter_examples, make=style.train_example)
    adapter = lora.put_in(model, seed=seed)
    plan = dataclasses.replace(size.adapter_plan, seed=seed)
    curve = train(model, data, plan, adapter.trainable())
    name = f"demo-lora-{style.name}"
    folder = export.save_adapter(adapter.weights(), lora.SETTINGS, "demo-chat", out / name)
    ask = score.in_torch(model.eval(), cutter, max_tokens=size.answer_tokens)
    count = max(4, size.scored // 4) if size.scored else 0
    scores = score.score_style(ask, style, count) if count else []
    print(f"{name}:")
    _tell(scores)
    _record(out / f"{name}.json", model, plan, len(data), curve, scores, command)
    card.write(out / f"{name}.json", folder, style.name)
    return folder


def make_vision(
    out: Path, size: Size, seed: int, device: str, command: str, start: Path | None = None
) -> Path:
    """demo-vision on top of the demo-chat in `out`, with its card; or from the weights of an earlier one."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    chat, cutter = export.load_model(out / "demo-chat")
    model, grown = vision_export.load(start) if start else vision_export.on_top_of(chat, cutter, size.tower)
    model = model.to(device).train()
    print(f"{parameters(model) / 1e6:.2f} M parameters on {device}", flush=True)
    rows = _timed(
        "pictures",
        lambda: vision_rows.build(grown, seed, size.picture_talks, model.image_token, size.tower.tokens),
    )
    talk = _timed("talk", lambda: corpus.build(cutter, seed, size.talks))
    plan = dataclasses.replace(size.vision_plan, seed=seed)
    tower, curve = train_vision(model, rows, talk, plan, tower_sees=bool(start))
    folder = vision_export.save(model, grown, out / "demo-vision")
    exported, _ = vision_export.load(folder, device)
    ask = vision_score.in_torch(exported, grown, max_tokens=min(size.answer_tokens, vision_score.MAX_TOKENS))
    few = max(2, size.scored // 2)
    scores = _timed("scores", lambda: vision_score.score(ask, few))
    _tell(scores)
    talks = score.in_torch(exported.language_model, grown, max_tokens=size.answer_tokens)
    scores += _timed("scores of talk", lambda: _talk_of_vision(talks, max(2, size.scored // 5)))
    _tell(scores[len(HELD_OUT_PICTURES) :])
    if start:
        before = start.parent / f"{start.name}.json"
        tower = Curve(**json.loads(before.read_bytes())["tower_curve"])
        command, curve = _after(before, command, curve)
    record = out / "demo-vision.json"
    _record(record, exported, plan, len(rows.data) + len(talk), curve, scores, command, tower)
    card.write(record, folder)
    return folder


def _tell(scores: Sequence[score.Score]) -> None:
    print(score.table(scores), flush=True)
    for one in scores:
        for asked, wanted, answered in one.wrong[:2]:
            print(
                f"  {one.skill}: {asked[:200]!r}\n    wanted   {wanted!r}\n    answered {answered!r}",
                flush=True,
            )


def _record(
    path: Path,
    model: Qwen3 | Llava,
    plan: Plan,
    conversations: int,
    curve: Curve,
    scores: Sequence[score.Score],
    command: str,
    tower_curve: Curve | None = None,
) -> None:
    """All that a card tells."""
    shape = model.text if isinstance(model, Llava) else model.shape
    on_gpu = next(model.parameters()).is_cuda
    found: dict[str, Any] = {
        "command": command,
        "seed": plan.seed,
        "conversations": conversations,
        "parameters": parameters(model),
        "context": shape.max_position_embeddings,
        "device": torch.cuda.get_device_name() if on_gpu else "a CPU",
        "torch": torch.__version__,
        "shape": dataclasses.asdict(shape),
        "plan": dataclasses.asdict(plan) | {"minutes": None if math.isinf(plan.minutes) else plan.minutes},
        "curve": dataclasses.asdict(curve),
        "scores": [dataclasses.asdict(one) for one in scores],
    }
    if isinstance(model, Llava) and tower_curve:
        found |= {"tower": dataclasses.asdict(model.tower), "tower_curve": dataclasses.asdict(tower_curve)}
    _write(path, found)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _timed(what: str, work: Any) -> Any:
    began = time.monotonic()
    made = work()
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)
    return made


def _score(options: argparse.Namespace) -> int:
    scores = _scores_of_pictures(options) if options.vision else _scores_of_talk(options)
    _tell(scores)
    if options.record:
        found = json.loads(options.record.read_bytes())
        found["scores"] = [dataclasses.asdict(one) for one in scores]
        found["scored"] = "over HTTP" if options.url else "in torch"
        _write(options.record, found)
        card.write(options.record, options.record.with_suffix(""), options.style)
    return int(not all(one.is_enough for one in scores))


def _scores_of_talk(options: argparse.Namespace) -> list[score.Score]:
    if not options.url:
        ask = score.in_torch(*export.load_model(options.folder))
        return score.score(ask, options.count, options.skills or tuple(HELD_OUT))
    model = options.model or "demo-chat"
    ask = score.over_http(options.url, model)
    if options.style:
        return score.score_style(ask, STYLES[options.style], options.count, options.skills or ())
    scores = score.score(ask, options.count, options.skills or tuple(HELD_OUT))
    if "json" in (options.skills or HELD_OUT):
        questions = list(held_out("json", score.SEED, options.count))
        guided = score.over_http(options.url, model, guided=True)
        scores.append(score.score_of(guided, score.GUIDED, questions))
    return scores


def _scores_of_pictures(options: argparse.Namespace) -> list[score.Score]:
    if options.url:
        name = options.model or "demo-vision"
        ask, talk = vision_score.over_http(options.url, name), score.over_http(options.url, name)
    else:
        model, cutter = vision_export.load(options.folder)
        ask, talk = vision_score.in_torch(model, cutter), score.in_torch(model.language_model, cutter)
    if options.skills:
        return vision_score.score(ask, options.count, options.skills)
    scores = vision_score.score(ask, options.count, tuple(HELD_OUT_PICTURES))
    return scores + _talk_of_vision(talk, max(2, options.count // 2))


def _talk_of_vision(ask: score.Ask, count: int) -> list[score.Score]:
    """What demo-chat does demo-vision does too; how well is needed of demo-chat alone."""
    return [dataclasses.replace(one, needed=None) for one in score.score(ask, count)]


def _score_image(options: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = image_export.load(options.folder, device)
    if options.url:
        scores = image_served.score(options.url, options.model, options.count, image_score.SETTINGS)
    else:
        scores = image_score.score(pipeline, options.count)
    image.tell(scores)
    if options.record:
        found = json.loads(options.record.read_bytes())
        found["scores"] = [dataclasses.asdict(one) for one in scores]
        found["scored"] = "over HTTP" if options.url else "in torch"
        _write(options.record, found)
        image_card.write(options.record, options.folder, pipeline)
    usual = next(one for one in scores if (one.steps, one.guidance) == image_score.USUAL)
    return int(usual.share() < image_score.NEEDED)


def _score_search(options: argparse.Namespace) -> int:
    if options.url:
        found = search_passages.load(options.folder)
        scores, how = search.score_over_http(options.url, found, options.count), "over HTTP"
    elif options.vllm:
        scores = search.score_in_vllm(options.folder, search.beside(options.folder), options.count)
        how = "with vLLM"
    else:
        scores = search.score_folders(options.folder, search.beside(options.folder), count=options.count)
        how = "in torch"
    search.tell(scores)
    if options.record:
        search.keep(options.folder.parent, scores, how)
    return int(not all(one.is_enough() for one in scores))


def _search_size(options: argparse.Namespace) -> search.SearchSize:
    minutes = options.minutes if options.step in ("search", "rerank") else None
    return search.with_limit(search.SMOKE if options.smoke else search.FULL, minutes)


def _install(options: argparse.Namespace) -> int:
    for folder in install.install(options.out):
        print(f"{folder}: {install.size(folder) / 1e6:.1f} MB")
    install.write_scores()
    return 0


def _draw(options: argparse.Namespace) -> int:
    print(image_served.draw_sheet(options.url, options.model, options.out))
    return 0


def _image_size(options: argparse.Namespace) -> image.ImageSize:
    # A limit of `all` is demo-chat's own.
    minutes = options.minutes if options.step == "image" else None
    return image.with_limit(image.SMOKE if options.smoke else image.FULL, minutes)


def _speech_size(options: argparse.Namespace) -> speech.SpeechSize:
    minutes = options.minutes if options.step == "speech" else None
    return speech.with_limit(speech.SMOKE if options.smoke else speech.FULL, minutes)


def _score_speech(options: argparse.Namespace) -> int:
    if options.url:
        ask, how = speech_score.over_http(options.url, options.model), "over HTTP"
    elif options.vllm:
        ask, how = speech_score.in_vllm(options.folder), "in vLLM"
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        ask, how = speech_score.in_torch(*speech_export.load(options.folder, device)), "in torch"
    scores = speech_score.score(ask, options.count, options.skills or tuple(speech_score.SKILLS))
    if options.url and not options.skills:
        scores.append(speech_score.score_long(ask, max(1, options.count // 20)))
    speech.tell(scores)
    if options.record:
        found = json.loads(options.record.read_bytes())
        found["scores"], found["scored"] = [dataclasses.asdict(one) for one in scores], how
        _write(options.record, found)
        speech_card.write(options.record, options.record.with_suffix(""))
    return int(not all(one.is_enough for one in scores))


OTHER_STEPS: dict[str, Callable[[argparse.Namespace], int]] = {
    "score": _score,
    "score-image": _score_image,
    "score-search": _score_search,
    "score-speech": _score_speech,
    "install": _install,
    "draw": _draw,
}
"""Those that make no model."""


def _size(options: argparse.Namespace) -> Size:
    size = SMOKE if options.smoke else FULL
    given = {name: getattr(options, name) for name in ("steps", "minutes", "rate")}
    plan = {name: value for name, value in given.items() if value is not None}
    if options.no_compile:
        plan["compiles"] = False
    what, data = PLANS.get(options.step, ("plan", "examples"))
    changed: dict[str, Any] = {what: dataclasses.replace(getattr(size, what), **plan)}
    if options.examples:
        changed[data] = options.examples
    if options.unscored:
        changed["scored"] = 0
    if options.small:
        changed["shape"] = SMALL
    return dataclasses.replace(size, **changed)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python scripts/demo", description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    for name, text in (
        ("all", "demo-chat, its adapters and all other demo models"),
        ("chat", "demo-chat alone"),
        ("lora", "adapters of the demo-chat that is in --out"),
        ("vision", "demo-vision, on the demo-chat that is in --out"),
        ("image", "demo-image alone"),
        ("search", "demo-embed and demo-rerank"),
        ("rerank", "demo-rerank alone, for the demo-embed that is in --out"),
        ("speech", "demo-speech alone; needs a speech synthesiser"),
    ):
        step = steps.add_parser(name, help=text)
        step.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for everything")
        step.add_argument("--seed", type=int, default=1)
        step.add_argument("--smoke", action="store_true", help="a tiny one, to see that it works")
        step.add_argument("--small", action="store_true", help="the small shape, for a CPU")
        step.add_argument("--examples", type=int, help="conversations to train on")
        step.add_argument("--steps", type=int)
        step.add_argument("--minutes", type=float, help="time limit of training (with `all`: of demo-chat)")
        step.add_argument("--rate", type=float, help="highest learning rate")
        step.add_argument("--start", type=Path, help="begin with the weights of this folder (chat, vision)")
        step.add_argument("--styles", nargs="*", choices=tuple(STYLES), help="adapters to make (all)")
        step.add_argument("--unscored", action="store_true", help="leave scores to `score --record`")
        step.add_argument("--no-compile", action="store_true", help="without torch.compile")
    step = steps.add_parser("install", help="copy what --out holds into the package")
    step.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of the made models")
    step = steps.add_parser("score-image", help="held-out scores of a demo-image folder")
    step.add_argument("folder", type=Path)
    step.add_argument("--count", type=int, default=200, help="prompts per setting")
    step.add_argument("--url", help="of a running server that draws them")
    step.add_argument("--model", default="demo-image", help="its name there")
    step.add_argument("--record", type=Path, help="JSON of its making: keep the scores there and in its card")
    step = steps.add_parser("score-search", help="held-out scores of a demo-embed folder and its reranker")
    step.add_argument("folder", type=Path, help="demo-embed; the reranker lies beside it")
    step.add_argument("--count", type=int, help="held-out questions (default: all)")
    step.add_argument("--url", help="of a running server that has both models")
    step.add_argument("--vllm", action="store_true", help="computed by vLLM, in this process")
    step.add_argument("--record", action="store_true", help="keep the scores in the records and the cards")
    step = steps.add_parser("score-speech", help="held-out scores of a demo-speech folder or a server")
    step.add_argument("folder", type=Path, nargs="?")
    step.add_argument("--vllm", action="store_true", help="ask vLLM's engine on this machine, not torch")
    step.add_argument("--url", help="of a running server that listens")
    step.add_argument("--model", default="demo-speech", help="its name there")
    step.add_argument("--count", type=int, default=200, help="recordings per skill")
    step.add_argument("--skills", nargs="*", choices=tuple(speech_score.SKILLS))
    step.add_argument("--record", type=Path, help="JSON of its making: keep the scores there and in its card")
    step = steps.add_parser("draw", help="a sheet of pictures from a running server, for the documentation")
    step.add_argument("--url", default="http://127.0.0.1:8000/v1")
    step.add_argument("--model", default="demo-image", help="its name there")
    step.add_argument("--out", type=Path, default=Path("docs/demo-image.png"), help="the picture")
    step = steps.add_parser("score", help="held-out scores of a folder or a server")
    step.add_argument("folder", type=Path, nargs="?")
    step.add_argument("--url", help="of a running server, such as http://127.0.0.1:8000/v1")
    step.add_argument("--model", help="its name there; demo-chat, or demo-vision with --vision")
    step.add_argument("--vision", action="store_true", help="questions about pictures")
    step.add_argument("--style", choices=tuple(STYLES), help="the model is the adapter of this style")
    step.add_argument(
        "--record", type=Path, help="JSON record of its making: keep the scores there and in its card"
    )
    step.add_argument("--count", type=int, default=200, help="questions per skill")
    step.add_argument("--skills", nargs="*", choices=(*HELD_OUT, *HELD_OUT_PICTURES))
    options = parser.parse_args(argv)
    if options.step in ("score", "score-speech") and not (options.folder or options.url):
        parser.error("give a folder or --url")
    if options.step == "score" and options.style and not options.url:
        parser.error("--style needs --url: adapters are asked by name, of a server")
    if options.step == "score" and options.skills:
        known = HELD_OUT_PICTURES if options.vision else HELD_OUT
        if unknown := [skill for skill in options.skills if skill not in known]:
            parser.error(f"{unknown[0]!r} is a skill {'without' if options.vision else 'with'} --vision")
    return options


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))

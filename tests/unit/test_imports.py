"""The direction of imports, and who may read or write the environment."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "dynamo_vllm"
PACKAGE = "dynamo_vllm"
# A part imports lower levels and itself. The command line stands above what it starts.
LEVELS = {
    part: level
    for level, parts in enumerate(
        (
            """wire wire_openai wire_pooling wire_transcription job config errors forking ports host_memory
            __init__""",
            "codec sizing",
            "engine kv lora media models",
            "roles admin",
            "serving",
            "supervise bench gateway observe",
            "export console",
            "cli",
            "__main__",
        )
    )
    for part in parts.split()
}
# Within level 0: what the others are written with.
WITHIN_LEVEL_0 = {
    "wire": {"errors"},
    "wire_openai": {"errors", "wire"},
    "wire_pooling": {"errors", "wire"},
    "wire_transcription": {"errors", "wire"},
    "config": {"errors", "host_memory"},
    "host_memory": {"errors"},
    "ports": {"errors"},
}
# Importing vLLM takes 10 s, the runtime 0.2 s: only these may.
HEAVY = {
    "vllm": ("engine/",),
    "vllm_omni": ("engine/",),
    "torch": ("engine/",),
    "diffusers": ("engine/omni/arguments.py",),
    "dynamo": (
        "serving/",
        "kv/events.py",
        "cli/start/frontend.py",
        "bench/local/caller.py",
        "bench/local/simulation.py",
    ),
}
READS_ENVIRONMENT = {
    "engine/structured_output/gate.py": "guide checkers get the environment of the worker",
    "config/build.py": "reads it once for everybody",
    "engine/process/parent.py": "runs in processes of vLLM, which nothing else tells who their parent is",
    "engine/patches/plugin.py": "runs in processes of vLLM, which nothing else tells what they are for",
    "engine/process/core_fork.py": "hands it to an engine core, which is forked from another process",
    "engine/process/preload.py": "puts back what it changed for the time of an import",
    "engine/patches/cpu/thread_count.py": "runs in vLLM's workers; OpenMP may be loaded before its variable",
    "engine/patches/nixl_pause.py": "runs in processes of vLLM, which the worker tells how long",
    "engine/patches/omni_text_stage.py": "runs in stages of vLLM-Omni, which the worker tells their model",
    "engine/patches/prometheus_folder.py": "asks as prometheus_client does whether its folder is set",
    "engine/process/prometheus.py": "asks as prometheus_client does whether its multi-process folder is set",
}
WRITES_ENVIRONMENT = {
    "engine/process/preload.py": "what libraries read when they are imported, for that moment",
    "forking.py": "a forked process gets the environment that was sent for it",
    "engine/process/environment.py": "vLLM's own variables",
    "engine/omni/arguments.py": "vLLM's, and what the processes of a pipeline's stages must know",
    "engine/process/parent.py": "tells the processes below a process of vLLM who their parent is",
    "engine/vllm/arguments.py": "what vLLM reads while it makes its configuration",
    "config/runtime_env.py": "the Rust runtime's variables",
    "config/folders.py": "where caches go, for libraries that read it when they are imported",
    "media/decode/decode_child.py": "those of the decoder's libraries, in a process that does nothing else",
}
NOT_IMPORTED = {
    "__main__.py": "python -m dynamo_vllm",
}
MOST_IN_A_FOLDER = 16
_WRITING = {"update", "setdefault", "pop", "clear"}
_ENVIRONMENT = re.compile(r"environ|getenv|putenv|unsetenv")
_IMPORT = re.compile(r"^[ \t]*(?:from \S+ import (?:\([^)]*\)|[^\n(]+)|import [^\n]+)", re.MULTILINE)
_TOLD = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Subscript)


def violations(path: str, source: str) -> list[str]:
    """What breaks the table in one module; `path` is relative to the package."""
    nodes = nodes_of(source)
    found = [broken for module in imported(nodes, path) if (broken := refused(path, module))]
    return found + environment_uses(nodes, path)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Those that the table is about; to read the syntax of whole modules takes seconds."""
    if not _ENVIRONMENT.search(source):
        source = "\n".join(line.strip() for line in _IMPORT.findall(source))
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, _TOLD)]


def imported(nodes: list[ast.AST], path: str) -> list[str]:
    """Full names of everything imported; `from a import b` counts as a.b."""
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [PACKAGE, *Path(path).parts[:-1]]
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def part_of(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def refused(path: str, module: str) -> str | None:
    top, *inner = module.split(".")
    if top in HEAVY:
        return None if path.startswith(HEAVY[top]) else f"{path} imports {module}"
    if top != PACKAGE or not inner:
        return None
    here, there = part_of(path), inner[0]
    if there not in LEVELS:  # a name of the package itself, such as __version__
        return None if there.startswith("__") else f"{path} imports {module}, which has no level"
    if here == there or LEVELS[there] < LEVELS[here] or there in WITHIN_LEVEL_0.get(here, ()):
        return None
    return f"{path} imports {module}"


def environment_uses(nodes: list[ast.AST], path: str) -> list[str]:
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if {alias.name for alias in node.names} & {"environ", "getenv", "environb"}:
                found.append(f"{path}:{node.lineno} imports the environment by name; write os.environ")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in ("getenv", "environb") or (node.attr == "environ" and not _writes(node, nodes)):
                if path not in READS_ENVIRONMENT:
                    found.append(f"{path}:{node.lineno} reads the environment")
            elif node.attr in ("environ", "putenv", "unsetenv") and path not in WRITES_ENVIRONMENT:
                found.append(f"{path}:{node.lineno} writes the environment")
    return found


def _writes(node: ast.Attribute, nodes: list[ast.AST]) -> bool:
    """os.environ[…] = …, del os.environ[…], os.environ.update(…)."""
    parent = next(
        (n for n in nodes if isinstance(n, ast.Subscript | ast.Attribute) and n.value is node),
        None,
    )
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Store | ast.Del)
    return isinstance(parent, ast.Attribute) and parent.attr in _WRITING


@functools.cache
def modules() -> dict[str, str]:
    """Path → source."""
    return {str(path.relative_to(SRC)): path.read_text() for path in sorted(SRC.rglob("*.py"))}


def test_modules_keep_to_the_table() -> None:
    """All at once: a case each takes longer than the work, and every line found names its module."""
    assert [line for path, source in modules().items() for line in violations(path, source)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count: types that two modules share have a module of their own."""
    graphlib.TopologicalSorter(dependencies(modules())).prepare()


def test_circle_is_found() -> None:
    sources = {
        "codec/a.py": "if TYPE_CHECKING:\n    from dynamo_vllm.codec.b import B",
        "codec/b.py": "def f():\n    from dynamo_vllm.codec import a",
    }
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(dependencies(sources)).prepare()


def dependencies(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = {dotted(path) for path in sources}
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = imported(nodes_of(source), path)
        whole = {name if name in known else name.rpartition(".")[0] for name in names}
        found[dotted(path)] = whole & known - {dotted(path)}
    return found


def test_no_folder_holds_more_than_a_reader_can_take_in() -> None:
    counts = Counter(str(Path(path).parent) for path in modules() if not path.endswith("__init__.py"))
    crowded = {folder: count for folder, count in counts.items() if count > MOST_IN_A_FOLDER}
    assert crowded == {}


def test_every_module_is_used() -> None:
    named = {name for path, source in modules().items() for name in names_of_modules(path, source)}
    unused = {path for path in modules() if not path.endswith("__init__.py") and dotted(path) not in named}
    assert unused == set(NOT_IMPORTED)


def dotted(path: str) -> str:
    return f"{PACKAGE}/{path.removesuffix('.py')}".replace("/", ".")


def names_of_modules(path: str, source: str) -> set[str]:
    """What a module imports or names in a text, which another process may import; not itself."""
    found = imported(nodes_of(source), path)
    found += re.findall(rf"\b{PACKAGE}(?:\.\w+)+", source)
    parts = [name.split(".") for name in found]
    return {".".join(name[:end]) for name in parts for end in range(2, len(name) + 1)} - {dotted(path)}


def test_every_part_has_a_level() -> None:
    assert {part_of(path) for path in modules()} <= set(LEVELS)


def test_every_exception_is_still_needed() -> None:
    for path in (*READS_ENVIRONMENT, *WRITES_ENVIRONMENT):
        assert "os.environ" in modules()[path]


@pytest.mark.parametrize(
    ("path", "source", "broken"),
    [
        ("codec/sampling.py", "from dynamo_vllm.engine import base", "imports dynamo_vllm.engine.base"),
        ("engine/vllm/engine.py", "import dynamo_vllm.kv.events", "imports dynamo_vllm.kv.events"),
        ("roles/text.py", "def f():\n    from dynamo_vllm.serving.worker import Worker", "serving.worker"),
        ("roles/text.py", "from ..serving import request", "imports dynamo_vllm.serving.request"),
        ("wire.py", "from dynamo_vllm.job import Job", "imports dynamo_vllm.job.Job"),
        ("serving/worker.py", "from dynamo_vllm.cli import main", "imports dynamo_vllm.cli.main"),
        ("serving/worker.py", "from dynamo_vllm.attic import thing", "which has no level"),
        ("serving/worker.py", "if TYPE_CHECKING:\n    from vllm import LLM", "imports vllm.LLM"),
        ("kv/dp.py", "import torch", "imports torch"),
        ("cli/start/worker.py", "from dynamo.runtime import Endpoint", "imports dynamo.runtime.Endpoint"),
        ("config/checks.py", "import os\nx = os.environ.get('X')", "reads the environment"),
        ("config/checks.py", "import os\nx = os.environ['X']", "reads the environment"),
        ("config/checks.py", "import os\nx = dict(os.environ)", "reads the environment"),
        ("config/checks.py", "import os\nx = os.getenv('X')", "reads the environment"),
        ("config/checks.py", "from os import environ", "imports the environment by name"),
        ("config/checks.py", "import os\nos.environ['X'] = '1'", "writes the environment"),
        ("config/runtime_env.py", "import os\nx = 'X' in os.environ", "reads the environment"),
        ("config/build.py", "import os\nos.environ.update(X='1')", "writes the environment"),
    ],
)
def test_checker_finds_what_breaks_the_table(path: str, source: str, broken: str) -> None:
    (found,) = violations(path, source)
    assert broken in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("serving/worker.py", "from dynamo_vllm import __version__, wire"),
        ("serving/worker.py", "from dynamo_vllm.engine.base import Engine"),
        ("engine/vllm/engine.py", "from vllm import SamplingParams\nfrom dynamo_vllm.engine import base"),
        ("cli/start/serve.py", "from dynamo_vllm.supervise import plan"),
        ("engine/process/environment.py", "import os\nos.environ['X'] = '1'\nos.environ.update(Y='1')"),
    ],
)
def test_checker_passes_what_the_table_allows(path: str, source: str) -> None:
    assert violations(path, source) == []

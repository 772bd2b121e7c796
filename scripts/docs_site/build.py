"""Builds the site in its own virtual environment, which it creates if needed."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from docs_site import pages

HERE = Path(__file__).parent
ENVIRONMENT = pages.ROOT / ".docs"
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = HERE / "requirements.txt"
STAGE = pages.ROOT / "build" / "site-pages"
SITE = pages.ROOT / "build" / "site"
USAGE = "usage: python scripts/docs_site [--serve [PORT]]"
PORT = 8001


def main(argv: list[str]) -> int:
    serve = argv[:1] == ["--serve"]
    port = argv[1:] if serve else argv
    if (argv and not serve) or len(port) > 1 or not all(word.isdecimal() for word in port):
        print(USAGE, file=sys.stderr)
        return 2
    code = make_environment() or build()
    if code or not serve:
        return code
    return show(int(port[0]) if port else PORT)


def make_environment() -> int:
    wanted = f"{sys.version}\n{REQUIREMENTS.read_text()}"
    ready = ENVIRONMENT / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return 0
    began = time.monotonic()
    print(f"[docs] installing the site's builder into {ENVIRONMENT.name} …", flush=True)
    report: Any = importlib.import_module("setup_report")
    report.LOG = str(ENVIRONMENT / "setup.log")
    ENVIRONMENT.mkdir(exist_ok=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--no-deps"]
    try:
        report.run(
            [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], "no environment could be made"
        )
        code, output = report.follow([*pip, "--progress-bar=off", "--requirement", str(REQUIREMENTS)])
        if code:
            raise report.failed("the builder of the site could not be installed", output)
    except report.SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    ready.write_text(wanted)
    print(f"[docs] ready after {time.monotonic() - began:.0f} s", flush=True)
    return 0


def build() -> int:
    """Build with warnings as errors: a broken link, a page without a link to it."""
    began = time.monotonic()
    pages.stage(STAGE)
    shutil.rmtree(SITE, ignore_errors=True)
    command = [str(PYTHON), "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    command += ["--conf-dir", str(HERE), "--doctree-dir", f"{STAGE}.cache", str(STAGE), str(SITE)]
    if code := subprocess.run(command, cwd=pages.ROOT, check=False).returncode:
        print("error: the site has faults, see above", file=sys.stderr)
        return code
    where = SITE.relative_to(pages.ROOT) / "index.html"
    print(f"{where}: {len(pages.pages())} pages in {time.monotonic() - began:.1f} s")
    return 0


def show(port: int) -> int:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        print(f"error: port {port}: {error.strerror}; {USAGE}", file=sys.stderr)
        return 1
    print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0

"""Builds the page of the web console from console/, or with --check compares the committed one with it.

Without node, or without its packages and a way to get them, --check says so and succeeds: only who changes
the page needs them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

CONSOLE = Path(__file__).resolve().parent.parent / "console"
INSTALL = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")


def main(arguments: list[str]) -> int:
    is_check = arguments == ["--check"]
    if problem := missing() or install():
        print(f"console: {problem}" + ("; the committed page is not checked" if is_check else ""))
        return 0 if is_check else 1
    commands = [("node_modules/.bin/tsc", "--noEmit"), ("node", "build.mjs", *arguments)]
    if is_check:
        commands.append(("node_modules/.bin/prettier", "--check", "--log-level=warn", "."))
    return max(subprocess.run(command, cwd=CONSOLE, check=False).returncode for command in commands)


def missing() -> str | None:
    absent = [name for name in ("node", "npm") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} here" if absent else None


def install() -> str | None:
    """Install the locked packages unless they are there."""
    installed = CONSOLE / "node_modules" / ".package-lock.json"
    if installed.is_file() and installed.stat().st_mtime >= (CONSOLE / "package-lock.json").stat().st_mtime:
        return None
    ran = subprocess.run(INSTALL, cwd=CONSOLE, check=False, capture_output=True, text=True)
    return None if ran.returncode == 0 else f"npm cannot install the packages of {CONSOLE.name}/"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

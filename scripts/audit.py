"""Asks PyPI which of the packages in `requirements/` have known vulnerabilities.

    python scripts/audit.py                   one line for each; exit status 1 where there are any
    python scripts/audit.py --url https://…   of an index that passes on PyPI's JSON

PyPI has the advisories of https://github.com/pypa/advisory-database with each release. An index without them
would say that nothing is known of anything, so a release that has some is asked for first.
"""

import argparse
import functools
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).resolve().parent.parent / "requirements"
PYPI = "https://pypi.org"
KNOWN_TO_BE_BAD = ("urllib3", "1.26.4")
AT_ONCE = 8
SECONDS = 30
FOUND, NOT_DONE = 1, 2


class CannotAsk(Exception):
    """The index does not answer, or has no advisories."""


@dataclass(frozen=True, order=True)
class Release:
    name: str
    version: str


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="audit.py", description="Known vulnerabilities of what is locked.")
    parser.add_argument("--url", default=PYPI, help="an index with PyPI's JSON (default: %(default)s)")
    url = parser.parse_args(arguments).url.rstrip("/")
    releases = locked(LOCKS)
    try:
        lines = audit(url, releases)
    except CannotAsk as exc:
        print(
            f"nothing was audited: {exc}; run it where PyPI itself answers, or name a --url", file=sys.stderr
        )
        return NOT_DONE
    print(
        "\n".join(
            [*lines, f"{len(releases)} releases, {len(lines)} with something known or not to be judged"]
        )
    )
    return FOUND if lines else 0


def locked(folder: Path) -> list[Release]:
    """Return every release that a lock names, for all machines."""
    found = set()
    for file in sorted(folder.glob("*.txt")):
        for line in file.read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                name, _, version = line.partition(";")[0].strip().partition("==")
                found.add(Release(name, version))
    return sorted(found)


def audit(url: str, releases: list[Release]) -> list[str]:
    """Return one line per known vulnerability; raises CannotAsk if the index has no advisories."""
    if not known(url, Release(*KNOWN_TO_BE_BAD)):
        raise CannotAsk(f"what answers as {url} has no advisories, not even for {' '.join(KNOWN_TO_BE_BAD)}")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return [line for lines in threads.map(lambda each: judged(url, each), releases) for line in lines]


def judged(url: str, release: Release) -> list[str]:
    found = known(url, release)
    if found is None:
        return [f"{release.name} {release.version}: not judged, the index does not have it"]
    return [f"{release.name} {release.version}: {described(each)}" for each in found]


def known(url: str, release: Release) -> list[dict[str, Any]] | None:
    """Return the advisories of a release that are not withdrawn; None if the index does not know it."""
    address = f"{url}/pypi/{release.name}/{release.version}/json"
    request = urllib.request.Request(address, headers={"Accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=trusted()) as answer:
            found = json.load(answer)["vulnerabilities"]
    except urllib.error.HTTPError as exc:
        if exc.code == 404:
            return None
        raise CannotAsk(f"{address} answers {exc.code}") from None
    except (OSError, ValueError, KeyError) as exc:
        raise CannotAsk(f"{address}: {exc!r}") from None
    return [each for each in found if not each.get("withdrawn")]


def described(advisory: dict[str, Any]) -> str:
    names = ", ".join([advisory["id"], *advisory.get("aliases", [])])
    fixed = ", ".join(advisory.get("fixed_in") or ["no release yet"])
    return f"{names}; fixed in {fixed}; {advisory.get('link', '')}"


@functools.cache
def trusted() -> ssl.SSLContext:
    """Return a context with the certificates that pip trusts."""
    return ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which lines of the pages run against a real stack, how a reader's words are filled in, and what is too much for that: the one list of what is checked and not run."""

from __future__ import annotations

import re

from .blocks import Block, commands

# What runs as it stands in a shell beside the stack.
RUN = {"semantide", "curl"}
PLAIN = {"export", "cat", "python3"}

# Programs that no line of a page runs here: each is checked by checks.py, and what it does is tested where the reason says.
CHECKED_ALONE = {
    "make": "targets of this repository: what they run are the suites, the demo and the site, which CI runs or a person starts",
    "docker": "wants an engine: tests/compose brings the stack up in containers and kills each",
    "helm": "wants a cluster: the options are rendered by real Helm here; tests/cluster installs and upgrades on a real control plane",
    "kubectl": "wants a cluster: resources and names are checked against the chart; tests/cluster uses them",
    "python": "benchmarks of minutes: tests/benchmarks runs each one's quick form",
    "pip": "installs from an index: CI does it in a clean clone",
    "redis-server": "the server of one's own: tests/conftest.py starts the same one with the same options",
}

# Lines of programs that do run elsewhere. (page, beginning of the line) -> why not here.
LINES = {
    ("docs/operations.md", "for room in"): "workers by hand for ever: tests/compose runs each in a container",
    ("docs/operations.md", "semantide api all"): "an API by hand for ever: `semantide up`, which all lines here talk to, starts this very process",
    ("docs/operations.md", "export SEMANTIDE_REDIS_URL"): "names the broker of the line before it",
    ("docs/operations.md", "for volume in"): "wants an engine: volumes of containers",
    ("docs/deploy.md", "python3 -m venv"): "makes an environment and fills it from an index: `make install` does that in CI",
    ("docs/latency.md", "export SEMANTIDE_SERVING"): "read by a process when it starts: test_shell.py starts one with them",
}


def why_not_run(block: Block, line: str) -> str:
    """The reason why this line is checked only; empty where it runs."""
    for (page, beginning), reason in LINES.items():
        if block.page == page and line.startswith(beginning):
            return reason
    return next((CHECKED_ALONE[command.program] for command in commands(line) if command.program in CHECKED_ALONE), "")


def is_up(line: str) -> bool:
    """Whether this is the line that starts the stack, which the fixture has done."""
    return bool(re.match(r"^(\.venv/bin/)?semantide up( |$)", line))

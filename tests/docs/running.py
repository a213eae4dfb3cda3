"""Which lines of the pages run against a real stack, how a reader's words are filled in, and what is too much for that: the one list of what is checked and not run."""

from __future__ import annotations

import re

from semantide.services.commandline.client import Client

from .blocks import Block, commands

# What runs as it stands in a shell beside the stack.
RUN = {"semantide", "curl", "redis-server"}
PLAIN = {"export", "cat", "python3"}

# Programs that no line of a page runs here: each is checked by checks.py, and what it does is tested where the reason says.
CHECKED_ALONE = {
    "make": "targets of this repository: what they run are the suites, the demo and the site, which CI runs or a person starts",
    "docker": "wants an engine: tests/compose brings the stack up in containers and kills each",
    "helm": "wants a cluster: the options are rendered by real Helm here; tests/cluster installs and upgrades on a real control plane",
    "kubectl": "wants a cluster: resources and names are checked against the chart; tests/cluster uses them",
    "python": "benchmarks of minutes, which `make bench` runs: the script and its options are checked here",
    "pip": "installs from an index: CI does it in a clean clone",
}

# Lines of programs that do run elsewhere. (page, beginning of the line) -> why not here.
LINES = {
    ("docs/operations.md", "for volume in"): "wants an engine: volumes of containers",
    ("docs/deploy.md", "python3 -m venv"): "makes an environment and fills it from an index: `make install` does that in CI",
    (
        "docs/console.md",
        "SEMANTIDE_DATA_DIR=.demo/kuairand",
    ): "a stack with the demo's data, in a clone: tests/console/first_recommendation.py walks it in a browser",
    ("docs/latency.md", "export SEMANTIDE_SERVING"): "read by a process when it starts: test_shell.py starts one with them",
}


def why_not_run(block: Block, line: str) -> str:
    """The reason why this line is checked only; empty where it runs."""
    for (page, beginning), reason in LINES.items():
        if block.page == page and line.startswith(beginning):
            return reason
    return next((CHECKED_ALONE[command.program] for command in commands(line) if command.program in CHECKED_ALONE), "")


def by_hand(block: Block) -> bool:
    """Whether a block starts a whole stack itself, which has a test of its own."""
    return "redis-server --port" in block.text


def is_up(line: str) -> bool:
    """Whether this is the line that starts the stack, which the fixture has done."""
    return bool(re.match(r"^(\.venv/bin/)?semantide up( |$)", line))


# Pages in the order in which a reader gets what the next one wants: first data and models, then what is done with them. Simulated people come first: what a log with
# chances says is asked of its newest part.
ORDER = (
    "docs/experiments.md", "docs/data.md", "README.md", "docs/start.md", "docs/console.md", "docs/pagewise.md", "docs/merger.md", "docs/linear.md", "docs/retriever.md",
    "docs/reward.md", "docs/alignment.md", "docs/serving.md", "docs/latency.md", "docs/runbooks.md",
)  # fmt: skip

# The same commands on less: regular expression -> what stands in its place.
SHORTER = (
    (r"simulate sim --users 5000 --items 2000", "simulate sim --users 150 --items 60"),
    (r"oracle --users 1000", "oracle --users 10"),
    (r"(semantide train\b)", r"\1 --set epochs=1"),
    (r"(semantide reward)(?! --weigh)", r"\1 --recipe tiny --set epochs=1"),
    (r"(semantide align)", r"\1 --set steps=2 --set evaluate_every=2 --set prompts=4 --set group=4 --set beams=2 --set held_out_users=30 --set probes=30"),
    (r"negatives --epochs 5", "negatives --epochs 1"),
)


def shortened(line: str) -> str:
    """A line with little to do."""
    for pattern, less in SHORTER:
        line = re.sub(pattern, less, line)
    return line


class Reader:
    """Whoever reads fills in what a page leaves open: the newest artifacts of the stack, its address, data of his own."""

    def __init__(self, client: Client, url: str) -> None:
        self._client, self._url = client, url

    def fill(self, line: str) -> str:
        """The line as this reader types it."""
        line = line.replace("http://127.0.0.1:8000", self._url).replace("path/to/your/data", "sim").replace("curl -s ", "curl -sS --fail-with-body ")
        line = re.sub(r"\bJOB\b", lambda _: self._client.jobs("train", "succeeded", 1)[0].id, line)
        made = {kind: self._made(kind) for kind in ("models", "rewards", "beams") if f"{kind}/sha256-..." in line}
        return re.sub(r"(--\S+ )(models|rewards|beams)/sha256-\.\.\.", lambda match: match[1] + self._choose(match[1].strip(), match[2], made, line), line)

    def _made(self, kind: str) -> list[str]:
        """References of the artifacts of a kind, the newest last; of models the generators."""
        found = [
            record for record in reversed(self._client.jobs(None, "succeeded", 1000)) if any(ref.startswith(f"{kind}/") for ref in record.artifacts.values())
        ]
        if kind == "models":
            found = [record for record in found if not record.spec.recipe.startswith(("retriever", "fuxi", "sasrec"))]
        return list(dict.fromkeys(ref for record in found for ref in record.artifacts.values() if ref.startswith(f"{kind}/")))

    def _choose(self, option: str, kind: str, made: dict[str, list[str]], line: str) -> str:
        if option in ("--retriever", "--vectors") or "semantide negatives" in line:
            return self._client.latest("train", "model", "retriever-small")
        # The second of two, as a judge beside a reward, is another one.
        return made[kind][-2] if option in ("--against", "--judge") else made[kind][-1]

"""charts/semantide/README.md, made from the values, their comments and their schema: ``python tests/charts/values_table.py`` writes it anew."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "semantide"
PAGE = CHART / "README.md"

_HEAD = """# Chart semantide

Generative recommendation on Kubernetes {kube} : the rooms of Semantide, Redis, and the operator that places NPUJobs and NPUServices.

```sh
helm install semantide charts/semantide --set imageRepository=REGISTRY/semantide,operatorImageRepository=REGISTRY/semantide-operator
helm test semantide --logs    # asks for a recommendation and shows it
helm upgrade semantide charts/semantide --reset-then-reuse-values
```

Profiles: `--values charts/semantide/values-cpu.yaml`, `values-nvidia.yaml`, `values-ascend.yaml`. [docs/operations.md](../../docs/operations.md) tells how
images are built, what an upgrade does and where data is; [values.yaml](values.yaml) is the whole list with its comments. A misspelt value is refused by name.
This page is made from them by `python tests/charts/values_table.py`.
"""

_PROCESS = """
## One process

An entry of `apis` or `workers` is a Deployment. `null` leaves it out, `{}` takes the defaults.

"""


def _comments() -> dict[str, str]:
    """The comment above each top-level value."""
    found: dict[str, str] = {}
    block: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if line.startswith("#"):
            block.append(line.removeprefix("#").strip())
            continue
        if match := re.match(r"(\w+):", line):
            found[match[1]] = " ".join(block)
        block = []
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text}`" if len(text) <= 60 else "see values.yaml"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def _fields(properties: dict[str, Any]) -> list[str]:
    rows = ["| field | meaning |", "|---|---|"]
    for name, field in properties.items():
        if "$ref" in field:
            field = {"description": "Requests and limits of each pod."}
        rows.append(f"| `{name}` | {_cell(field['description'])} |")
    return rows


def page() -> str:
    """The page as it should be."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    kube = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    comments = _comments()
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for name, default in values.items():
        field = schema["properties"][name]
        choices = f" One of {', '.join(f'`{choice}`' for choice in field['enum'])}." if "enum" in field else ""
        rows.append(f"| `{name}` | {_shown(default)} | {_cell(comments[name] or field.get('description', ''))}{choices} |")
    values_part = "\n## Values\n\n" + "\n".join(rows) + "\n"
    process_part = _PROCESS + "\n".join(_fields(schema["$defs"]["process"]["properties"])) + "\n"
    return _HEAD.format(kube=f"{kube} or newer").replace(" :", ":") + values_part + process_part


if __name__ == "__main__":
    PAGE.write_text(page())

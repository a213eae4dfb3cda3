"""What is made from the settings: the table of environment variables in docs/operations.md, and `settings` in the chart's schema of values.

``python tests/charts/environment_table.py`` writes both anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
SCHEMA = Path(__file__).resolve().parents[2] / "charts" / "semantide" / "values.schema.json"
# What the chart sets itself.
OWN = ("data_dir", "redis_url", "host", "port", "url", "api_keys", "metrics_port", "metrics_host")
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return f"`{json.dumps(value)}`"
    return f"`{value}`" if str(value) else ""


def table(settings: Any) -> str:
    """Markdown rows: variable, default, meaning."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        aliases = getattr(field.validation_alias, "choices", None)
        names = [alias for alias in aliases if alias.isupper()] if aliases else [f"SEMANTIDE_{name.upper()}"]
        meaning = (field.description or "").replace("``", "`").replace("|", "\\|")
        rows.append(f"| {' or '.join(f'`{each}`' for each in names)} | {_default(field.default)} | {meaning} |")
    return "\n".join(rows)


def shown() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def schema(settings: Any) -> dict[str, Any]:
    """JSON schema of every setting that the chart's `settings` may hold, by its name in camelCase."""
    fields = settings.model_json_schema()["properties"]
    found = {}
    for name in settings.model_fields:
        if name not in OWN:
            kept = {key: value for key, value in fields[name].items() if key not in ("title", "default", "format")}
            found[re.sub(r"_(\w)", lambda match: match[1].upper(), name)] = kept
    return found


def main() -> None:
    """Write the page and the chart's schema as of now."""
    from semantide.shared.config import Settings

    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(Settings)}\n{END}{rest.partition(END)[2]}")
    chart = json.loads(SCHEMA.read_text())
    chart["properties"]["settings"]["properties"] = schema(Settings)
    SCHEMA.write_text(json.dumps(chart, indent=2) + "\n")


if __name__ == "__main__":
    main()

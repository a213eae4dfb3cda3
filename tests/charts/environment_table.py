"""What is made from the settings: the tables of environment variables in docs/operations.md and docs/operator.md, and `settings` and `operatorSettings` in
the chart's schema of values.

``python tests/charts/environment_table.py`` writes all of them anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
OPERATOR_PAGE = PAGE.with_name("operator.md")
SCHEMA = Path(__file__).resolve().parents[2] / "charts" / "semantide" / "values.schema.json"
# What the chart sets itself.
OWN = ("data_dir", "redis_url", "host", "port", "url", "api_keys", "user_id_key", "metrics_port", "metrics_host")
OPERATOR_OWN = (
    "namespace", "own_namespace", "identity", "image", "port", "scheduler", "profile", "resource_name", "device_info_namespace", "log_level", "pod_template", "replica_template", "release", "api_keys",
)  # fmt: skip
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return f"`{json.dumps(value)}`"
    return f"`{value}`" if str(value) else ""


def table(settings: Any, prefix: str = "SEMANTIDE_") -> str:
    """Markdown rows: variable, default, meaning."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        aliases = getattr(field.validation_alias, "choices", None)
        names = [alias for alias in aliases if alias.isupper()] if aliases else [f"{prefix}{name.upper()}"]
        meaning = (field.description or "").replace("``", "`").replace("|", "\\|")
        rows.append(f"| {' or '.join(f'`{each}`' for each in names)} | {_default(field.default)} | {meaning} |")
    return "\n".join(rows)


def shown(page: Path = PAGE) -> str:
    """The table that a page has."""
    return page.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def schema(settings: Any, own: tuple[str, ...] = OWN) -> dict[str, Any]:
    """JSON schema of every setting that the chart's values may hold, by its name in camelCase."""
    fields = settings.model_json_schema()["properties"]
    found = {}
    for name in settings.model_fields:
        if name not in own:
            kept = {key: value for key, value in fields[name].items() if key not in ("title", "default", "format")}
            found[re.sub(r"_(\w)", lambda match: match[1].upper(), name)] = kept
    return found


def main() -> None:
    """Write the pages and the chart's schema as of now."""
    from semantide.operators.settings import OperatorSettings
    from semantide.shared.config import Settings

    for page, settings, prefix in ((PAGE, Settings, "SEMANTIDE_"), (OPERATOR_PAGE, OperatorSettings, "SEMANTIDE_OPERATOR_")):
        head, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{head}{BEGIN}\n{table(settings, prefix)}\n{END}{rest.partition(END)[2]}")
    chart = json.loads(SCHEMA.read_text())
    chart["properties"]["settings"]["properties"] = schema(Settings)
    chart["properties"]["operatorSettings"]["properties"] = schema(OperatorSettings, OPERATOR_OWN)
    SCHEMA.write_text(json.dumps(chart, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The table of environment variables in docs/operations.md, made from the settings: ``python tests/charts/environment_table.py`` writes it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
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


def main() -> None:
    """Write the page with the table of now."""
    from semantide.shared.config import Settings

    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(Settings)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

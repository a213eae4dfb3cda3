"""docs/operations.md says what is true."""

from __future__ import annotations

import re
from types import ModuleType

from semantide.services.commandline.main import app
from semantide.shared.config import Settings


def test_the_table_has_every_setting(environment_table: ModuleType) -> None:
    assert environment_table.shown() == environment_table.table(Settings), "run `python tests/charts/environment_table.py`"


def test_every_command_exists(environment_table: ModuleType) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups}
    named = set(re.findall(r"(?:`|^|\$ )semantide ([a-z]+)", environment_table.PAGE.read_text(), re.MULTILINE))
    assert named and named <= commands | groups

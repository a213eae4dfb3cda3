"""The pages that are made from the code itself: routes from the rooms' OpenAPI document, verbs from the command line's parser, methods from the client."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_METHODS = ("get", "post", "put", "delete", "patch")


_ERROR = "#/components/schemas/ErrorAnswer"


def _cell(text: Any) -> str:
    return re.sub(r"\s+", " ", str(text)).strip().replace("|", "\\|")


def _code(text: Any) -> str:
    """Code in a cell of a table."""
    return f"`{_cell(text)}`" if str(text) else ""


# ---- REST


class _NoBroker:
    """For rooms that only tell their routes: it knows of nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_options: None


def document() -> dict[str, Any]:
    """The OpenAPI document of all rooms on one port. Nothing is connected: only the description is read."""
    from semantide.shared import operations_api
    from semantide.shared.artifacts import ArtifactStore
    from semantide.shared.config import Settings
    from semantide.shared.contracts import ROOMS
    from semantide.shared.http import build_app
    from semantide.shared.queues import Queues
    from semantide.shared.room import Room

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), redis_url="redis://127.0.0.1:1/0", artifacts_url="", api_keys="none")
        store, queues = ArtifactStore(settings.artifacts_root), Queues(settings.redis_url)
        rooms = [Room(name, settings, _NoBroker(), store, queues) for name in ROOMS]
        doors = [importlib.import_module(f"semantide.services.{room.name}.api").build(room) for room in rooms]
        found: dict[str, Any] = build_app(rooms, [operations_api.build(rooms[0]), *doors]).openapi()
    return found


def _kind(schema: dict[str, Any]) -> str:
    """What a schema allows, in few words; parts of it by their names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_kind(part) for part in schema[several]))
    if "enum" in schema:
        return " or ".join(_code(value) for value in schema["enum"])
    if "const" in schema:
        return _code(schema["const"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_kind(inner)}" if isinstance(inner, dict) and inner else "object"
    return kind


_BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "length ≥",
    "maxLength": "length ≤",
    "minItems": "entries ≥",
    "maxItems": "entries ≤",
}


def _bounds(schema: dict[str, Any]) -> str:
    parts = [schema, *schema.get("anyOf", [])]
    return ", ".join(f"{sign} {part[name]}" for part in parts for name, sign in _BOUNDS.items() if name in part)


def _fields(schema: dict[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    for name, each in schema.get("properties", {}).items():
        default = "required" if name in required else _code(each["default"]) if each.get("default") not in (None, "") else ""
        notes = "; ".join(part for part in (_cell(each.get("description", "")), _bounds(each)) if part)
        rows.append(f"| `{name}` | {_kind(each)} | {default} | {notes} |")
    return rows


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    from semantide.shared.access import OPEN_PATHS, ROUTES

    route = f"{method.upper()} {path}"
    role = (
        "none" if path in OPEN_PATHS else next((role for role, routes in ROUTES.items() if route in {re.sub(r":path", "", each) for each in routes}), "admin")
    )
    yield f"### {route}\n"
    yield f"{operation.get('summary', '')}. Key: {role}.\n"
    if text := operation.get("description"):
        yield f"{text}\n"
    if parameters := operation.get("parameters"):
        yield "| parameter | in | type | |\n|---|---|---|---|"
        for each in parameters:
            schema = each.get("schema", {})
            notes = "; ".join(part for part in ("required" if each.get("required") else "", _cell(each.get("description", "")), _bounds(schema)) if part)
            yield f"| `{each['name']}` | {each['in']} | {_kind(schema)} | {notes} |"
        yield ""
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body: {_kind(body.get('schema', {}))} (`{kind}`).\n"
    answers = []
    for status, answer in operation.get("responses", {}).items():
        content = answer.get("content", {})
        if _ERROR in [each.get("schema", {}).get("$ref") for each in content.values()]:
            continue  # said once, at the top
        shown = " or ".join(dict.fromkeys(_kind(each.get("schema", {})) if kind == "application/json" else f"`{kind}`" for kind, each in content.items()))
        answers.append(f"{status}{f' ({shown})' if shown else ''}")
    yield f"Answers: {', '.join(answers)}.\n"


def rest() -> str:
    """The page of all routes."""
    found = document()
    routes: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in found["paths"].items():
        for method in (name for name in _METHODS if name in operations):
            routes.setdefault((operations[method].get("tags") or ["other"])[0], []).append((method, path, operations[method]))
    lines = [
        "# REST\n",
        "Every route of every room, from the description that a running stack gives at `/openapi.json` and shows at `/docs`. A key goes into `Authorization: Bearer KEY` or `X-API-Key`;",
        "which role a route wants is said with it ([keys](operations.md#keys)).\n",
        "Every route may also answer with an error, an [ErrorAnswer](#erroranswer): 400 and 422 for a wrong request, 401 and 403 for a key that is missing or may not, 404 and 405 for what is not there, 409 where it contradicts what is, 413 where it is too large,",
        "429 (with `Retry-After`) where too many ask, 500 where the fault is ours, 503 where the broker or a model is away, 507 where the disk is full.\n",
    ]
    for tag, operations in routes.items():
        lines.append(f"## {tag.capitalize()}\n")
        for method, path, operation in operations:
            lines += _operation(method, path, operation)
    lines.append("## Objects\n")
    for name, schema in sorted(found.get("components", {}).get("schemas", {}).items()):
        lines += [f"### {name}\n", f"{schema.get('description', '')}\n", *(_fields(schema) if schema.get("properties") else [_kind(schema)]), ""]
    return "\n".join(lines)


# ---- the command line


def _verb(name: str, command: Any) -> Iterator[str]:
    yield f"### {name}\n"
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and "--help" not in each.opts]
    usage = " ".join(each.name.upper() if each.required else f"[{each.name.upper()}]" for each in arguments)
    yield f"`{' '.join(part for part in (name, usage, '[OPTIONS]' if options else '') if part)}`\n"
    yield f"{_cell(command.help or '')}\n"
    if arguments or options:
        yield "| | default | |\n|---|---|---|"
    for each in (*arguments, *options):
        shown = each.name.upper() if each in arguments else ", ".join((*each.opts, *each.secondary_opts))
        default = "required" if each.required else _code(each.default) if each.default not in (None, False, "", (), []) and not callable(each.default) else ""
        yield f"| `{shown}` | {default} | {_cell(getattr(each, 'help', None) or '')} |"
    yield ""


def verbs() -> dict[str, Any]:
    """Every verb with its parser, those of groups by both words."""
    import typer

    from semantide.services.commandline.main import app

    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found.update({f"semantide {name} {each}": part for each, part in inner.items()} if inner else {f"semantide {name}": command})
    return found


def commands() -> str:
    """The page of all verbs."""
    lines = [
        "# Command line\n",
        "`semantide VERB --help` says the same. Exit status: 0 done, 1 something failed or some rows were rejected, 2 wrong use, 130 interrupted. Which verb does what, in one table: [operations](operations.md#the-command-line).\n",
    ]
    for name, command in verbs().items():
        lines += _verb(name, command)
    return "\n".join(lines)


# ---- the Python client


def _signature(name: str, function: Any) -> str:
    text = str(inspect.signature(function)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")
    return f"{name}{re.sub(r'(semantide|pathlib|collections|typing)[a-z_.]*[.]', '', text)}"


def python_client() -> str:
    """The page of the client's classes."""
    import semantide.client as client

    lines = ["# Python client\n", "What `semantide.client` exports; [programs](client.md) tells how it is used.\n"]
    for name in client.__all__:
        kind = getattr(client, name)
        lines += [f"## {name}\n", f"{inspect.cleandoc(kind.__doc__ or '')}\n"]
        if dataclasses.is_dataclass(kind):
            lines += ["| field | type | default |", "|---|---|---|"]
            lines += [
                f"| `{each.name}` | {_code(each.type)} | {_code(each.default) if each.default is not dataclasses.MISSING else ''} |"
                for each in dataclasses.fields(kind)
            ]
            lines.append("")
        elif hasattr(kind, "model_fields"):
            lines += ["| field | type |", "|---|---|"]
            lines += [f"| `{each}` | {_code(getattr(field.annotation, '__name__', field.annotation))} |" for each, field in kind.model_fields.items()]
            lines.append("")
        elif not issubclass(kind, Exception):
            lines += [f"`{_signature(name, kind.__init__)}`\n"]
        if name in ("Client", "AsyncClient"):
            for each, method in inspect.getmembers(kind, inspect.isfunction):
                if not each.startswith("_"):
                    waits = "await " if inspect.iscoroutinefunction(method) else ""
                    lines += [f"### {name}.{each}\n", f"`{waits}{_signature(each, method)}`\n", f"{inspect.cleandoc(method.__doc__ or '')}\n"]
    return "\n".join(lines)


# ---- tables inside of pages

KERNELS = ("<!-- kernels: begin -->", "<!-- kernels: end -->")


def kernels() -> str:
    """Every kernel, its file and the devices that have a form of their own."""
    import pkgutil

    from semantide import kernels as package
    from semantide.kernels.dispatch import Kernel

    found: dict[str, Kernel[Any, Any]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith(("_", "triton")):  # whatever a machine without Triton can import
            content = vars(importlib.import_module(f"semantide.kernels.{module.name}"))
            found.update({each.__name__: each for each in content.values() if isinstance(each, Kernel)})
    rows = ["| kernel | file | own forms for | |", "|---|---|---|---|"]
    for name, each in sorted(found.items()):
        place = each.__module__.removeprefix("semantide.").replace(".", "/")
        rows.append(
            f"| `{name}` | `{place}.py` | {', '.join(sorted(each.registry))} | {_cell((each.__doc__ or '').split(chr(10) + chr(10))[0]).replace('``', '`')} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Write the table of kernels into its page."""
    page = Path(__file__).with_name("kernels.md")
    head, _, rest = page.read_text().partition(KERNELS[0])
    page.write_text(f"{head}{KERNELS[0]}\n{kernels()}\n{KERNELS[1]}{rest.partition(KERNELS[1])[2]}")


if __name__ == "__main__":
    main()

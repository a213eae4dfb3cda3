"""``semantide variants``: models that answer a share of the users beside the live one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings
from semantide.shared.errors import NotFound

app = typer.Typer(no_args_is_help=True, help="Models that answer a share of the users beside the live one.")

_PATH = "/v1/serving/variants"
_LIVE = "live"

Name = Annotated[str, typer.Argument(help="Name of the variant, as answers and metrics show it")]


@app.command("list")
def list_variants(as_json: AsJson = False) -> None:
    """Show how users are divided."""
    _show(Client(Settings()).get(_PATH), as_json)


@app.command("set")
def set_variant(
    name: Name,
    model: Annotated[str, typer.Option(help="Reference of the model, as `semantide artifacts models` lists it")],
    share: Annotated[float, typer.Option(help="Of all users, 0 to 1; the live model keeps what the variants leave")],
    catalog: Annotated[str | None, typer.Option(help="Catalog to serve it with; default: the newest of the line that it was trained on")] = None,
    salt: Annotated[str | None, typer.Option(help="Another salt divides all users anew")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also take a model that is no candidate")] = False,
    as_json: AsJson = False,
) -> None:
    """Add a variant or change one; the others stay as they are."""
    client = Client(Settings())
    wanted = [variant for variant in _present(client) if variant["name"] != name]
    wanted.append({"name": name, "model": model, "share": share} | ({"catalog": catalog} if catalog else {}))
    _show(client.call("PUT", _PATH, json={"variants": wanted, "force": force} | ({"salt": salt} if salt is not None else {})), as_json)


@app.command("remove")
def remove_variant(name: Name, as_json: AsJson = False) -> None:
    """Give a variant's users back to the live model."""
    client = Client(Settings())
    present = _present(client)
    if name not in {variant["name"] for variant in present}:
        raise NotFound(f"there is no variant {name!r}: `semantide variants list` shows those that are there")
    _show(client.call("PUT", _PATH, json={"variants": [variant for variant in present if variant["name"] != name]}), as_json)


@app.command("end")
def end_split(as_json: AsJson = False) -> None:
    """Give all users back to the live model."""
    _show(Client(Settings()).call("PUT", _PATH, json={"variants": []}), as_json)


def _present(client: Client) -> list[dict[str, Any]]:
    """The variants beside the live model, as a request names them."""
    fields = ("name", "model", "catalog", "share")
    return [{field: variant[field] for field in fields} for variant in client.get(_PATH)["variants"] if variant["name"] != _LIVE]


def _show(split: dict[str, Any], as_json: bool) -> None:
    if as_json:
        display.as_json(split)
        return
    rows = [
        [one["name"], f"{one['share']:.2%}", one["model"], one["catalog"], "yes" if one["loaded"] else one["error"] or "being loaded"]
        for one in split["variants"]
    ]
    display.table("users are divided between", ["variant", "share", "model", "catalog", "loaded"], rows)

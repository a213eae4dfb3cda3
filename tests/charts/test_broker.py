"""The broker that the chart and Compose start: what it has acknowledged stays, whichever image reads it next."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from semantide.shared.broker import ConnectionLost, ResponseError, connect, free_port, server_binary

from .test_chart import Render, of_kind

COMPOSE = Path(__file__).resolve().parents[2] / "docker-compose.yml"
BEFORE = ["redis-server", "--dir", "/data", "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
"""As the chart before this one started it, with an image of Redis."""


def command_of(place: str, render: Render) -> list[str]:
    if place == "compose":
        # Compose reads a doubled dollar sign as a single one.
        return [part.replace("$$", "$") for part in yaml.safe_load(COMPOSE.read_text())["services"]["redis"]["command"]]
    found: list[str] = of_kind(render(), "StatefulSet")["shop-semantide-redis"]["spec"]["template"]["spec"]["containers"][0]["command"]
    return found


@pytest.mark.parametrize("place", ["chart", "compose"])
def test_the_broker_keeps_every_acknowledged_write(render: Render, place: str) -> None:
    command = command_of(place, render)
    start = command.index("redis-server") + 1
    options = dict(zip(command[start::2], command[start + 1 :: 2], strict=True))
    assert options["--appendonly"] == "yes" and options["--appendfsync"] == "always" and options["--maxmemory-policy"] == "noeviction"
    assert options["--aof-use-rdb-preamble"] == "no", "a file with one is not read by an older version"
    assert options["--dir"] == "/data" and options.get("--requirepass", "$(REDISCLI_AUTH)") == "$(REDISCLI_AUTH)"


def test_one_image_of_a_free_licence_is_named_everywhere(render: Render) -> None:
    container = of_kind(render(), "StatefulSet")["shop-semantide-redis"]["spec"]["template"]["spec"]["containers"][0]
    service = yaml.safe_load(COMPOSE.read_text())["services"]["redis"]
    assert service["image"] == f"${{REDIS_IMAGE:-{container['image']}}}" and container["image"].startswith("valkey/valkey:")
    assert service["user"] == "999:999", "the image's own start, which would leave root, knows only its server's name"


@contextmanager
def broker(command: list[str], folder: Path) -> Iterator[Any]:
    """A client of the server that ``command`` starts, which is called redis-server as in both images; its data is in ``folder``."""
    programs = folder.with_name("programs")
    programs.mkdir(exist_ok=True)
    if not (programs / "redis-server").exists():
        (programs / "redis-server").symlink_to(server_binary())
    folder.mkdir(exist_ok=True)
    port = free_port()
    own = [{"/data": str(folder), "$(REDISCLI_AUTH)": ""}.get(part, part) for part in command]
    process = subprocess.Popen(
        [*own, "--port", str(port), "--bind", "127.0.0.1"],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    client = connect(f"redis://127.0.0.1:{port}/0", check=False)
    try:
        while process.poll() is None:
            try:
                client.ping()
                break
            except ConnectionLost:
                continue
        assert process.poll() is None, "the broker refused its own file"
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait()


@pytest.mark.parametrize("place", ["chart", "compose"])
def test_what_another_version_wrote_is_read_and_written_so_that_every_version_reads_it(render: Render, place: str, tmp_path: Path) -> None:
    command, folder = command_of(place, render), tmp_path / "data"
    with broker(BEFORE, folder) as client:
        client.xadd("events", {"a": "b"})
        client.xgroup_create("events", "readers", 0)
        client.hset("record", mapping={"state": "queued"})
        rewrite(client)
        client.set("late", "1")
    (base,) = (folder / "appendonlydir").glob("*.base.rdb")
    if (raw := base.read_bytes()).startswith(b"VALKEY"):
        # As Redis 7.4 would have written it, whose versions Valkey does not count on; a sum of zero is none.
        base.write_bytes(b"REDIS0012" + raw[9:-8] + bytes(8))
    with broker(command, folder) as client:
        assert client.xlen("events") == 1 and client.xinfo_groups("events")[0]["name"] == b"readers"
        assert client.hgetall("record") == {b"state": b"queued"} and client.get("late") == b"1"
        rewrite(client)
        (base,) = (folder / "appendonlydir").glob("*.base.*")
        assert base.suffix == ".aof" and base.read_bytes().startswith(b"*"), "commands alone"


def rewrite(client: Any) -> None:
    """Begin the file anew, and wait for that."""
    while True:
        try:
            client.bgrewriteaof()
            break
        except ResponseError:  # one is under way
            continue
    while (state := client.info("persistence"))["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
        pass
    assert state["aof_last_bgrewrite_status"] == "ok"

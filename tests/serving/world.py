"""A small catalog, tiny random generators, the real application on a real port, and a storm of requests against it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from semantide.services.serving import api
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Pair
from semantide.shared.catalog import Catalog
from semantide.shared.http import build_app
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.room import Room
from semantide.shared.server import Server as HttpServer

LEVEL_SIZES = (8, 8, 8)
DIGEST = "tokenizer-a"


def make_catalog(folder: Path, items: int = 200, seed: int = 0, digest: str = DIGEST, level_sizes: tuple[int, ...] = LEVEL_SIZES) -> Catalog:
    """Items i0 .. with distinct random codes, a colour (i % 3) and a size (i % 2) as categories; more items keep the codes of fewer."""
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(int(np.prod(level_sizes)))[:items]
    codes = np.stack(np.unravel_index(numbers, level_sizes), axis=1).astype(np.int64)
    catalog = Catalog(tuple(f"i{row}" for row in range(items)), codes, level_sizes, digest)
    catalog.save(folder)
    categories = [[("red", "green", "blue")[row % 3], ("small", "large")[row % 2]] for row in range(items)]
    table = pa.table({"item": list(catalog.item_ids), "title": [f"Item {row}" for row in range(items)], "categories": categories, "available": [True] * items})
    pq.write_table(table, folder / "item_info.parquet")
    return catalog


def make_model(folder: Path, seed: int = 0, catalog_ref: str = "", digest: str = DIGEST, level_sizes: tuple[int, ...] = LEVEL_SIZES, **shape: Any) -> Generator:
    """A random generator with the header that a training job writes; small unless ``shape`` says otherwise."""
    torch.manual_seed(seed)
    small = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32, "initializer_range": 0.5}
    generator = Generator(GeneratorConfig(level_sizes, **{**small, **shape}))
    generator.save_pretrained(folder)
    header = {
        "dataset": f"datasets/sha256-{0:064x}",
        "catalog": catalog_ref,
        "tokenizer_digest": digest,
        "level_sizes": list(level_sizes),
        "recipe": "tiny",
        "metrics": {"ndcg@10": 0.1},
        "max_items": 20,
    }
    (folder / "semantide.json").write_text(json.dumps(header))
    return generator


@dataclass
class World:
    """A serving room with one catalog and as many models as a test wants."""

    room: Room
    folder: Path
    catalog_ref: str = ""
    catalogs: dict[str, Catalog] = field(default_factory=dict)
    models: dict[str, Generator] = field(default_factory=dict)

    def add_catalog(self, **options: Any) -> str:
        folder = self.folder / f"catalog-{len(self.catalogs)}"
        catalog = make_catalog(folder, **options)
        ref = self.room.store.put("catalogs", folder)
        self.catalogs[ref] = catalog
        return ref

    def add_model(self, seed: int = 0, catalog_ref: str = "", **options: Any) -> str:
        folder = self.folder / f"model-{len(self.models)}"
        generator = make_model(folder, seed, catalog_ref or self.catalog_ref, **options)
        ref = self.room.store.put("models", folder)
        self.models[ref] = generator
        return ref

    def candidate(self, seed: int = 0) -> str:
        ref = self.add_model(seed)
        Registry(self.room.broker).register(Candidate(model=ref, catalog=self.catalog_ref))
        return ref

    def live(self, seed: int = 0) -> Pair:
        pair = Pair(model=self.candidate(seed), catalog=self.catalog_ref)
        Registry(self.room.broker).promote(pair)
        return pair


class Server:
    """The application of some rooms behind uvicorn, in a thread."""

    def __init__(self, room: Room) -> None:
        app = build_app([room], [api.build(room)], [lambda: api.ready(room)], [lambda: api.start(room)])
        self.service = api._service(room)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"Authorization": "Bearer test-key"}
        self._server = HttpServer(app, "127.0.0.1", port, backlog=4096)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.client = httpx.Client(base_url=self.url, headers=self.headers, timeout=120)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(60)

    def recommend(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/recommendations", json=body)

    def items(self, **body: Any) -> list[str]:
        response = self.recommend(**body)
        assert response.status_code == 200, response.text
        return [hit["item"] for hit in response.json()["items"]]

    def loaded(self) -> Any:
        live = self.client.get("/v1/serving/live").json()
        return {"model": live["loaded_model"], "catalog": live["loaded_catalog"]}


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something that happens in the background; the time is for the slowest of machines."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@dataclass(frozen=True)
class Reply:
    """Answer to one request of a storm. ``begin`` and ``seconds`` by the event loop's clock."""

    number: int
    status: int
    body: dict[str, Any]
    begin: float
    seconds: float


async def post(url: str, path: str, body: Any, key: str = "test-key") -> tuple[int, dict[str, Any]]:
    """One POST on a connection of its own."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    raw = await reader.read()
    writer.close()
    top, _, payload = raw.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(payload)


async def storm(url: str, bodies: list[Any], spread_seconds: float = 0.0, key: str = "test-key") -> list[Reply]:
    """Send all recommendation requests, each on its own connection: at once, or evenly over some seconds."""
    clock = asyncio.get_running_loop().time

    async def one(number: int, body: Any) -> Reply:
        await asyncio.sleep(spread_seconds * number / len(bodies))
        begin = clock()
        status, answer = await post(url, "/v1/recommendations", body, key)
        return Reply(number, status, answer, begin, clock() - begin)

    return list(await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies))))

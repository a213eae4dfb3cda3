"""Who may do what: the role that every route wants, as one table. What is not in it only an admin may do.

read    ask: recommendations, scores, what is stored and what runs
write   bring data in: interactions, items, files
admin   change what the stack does, and what concerns a person: jobs, promotions, queues, deletion and export of users, the audit log
"""

from __future__ import annotations

import re
from functools import cache

from semantide.shared.api_keys import ROLES, Role

OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that want no key."""

UNLIMITED_PATHS = (*OPEN_PATHS, "/metrics")
"""Paths whose requests no limit counts."""

ROUTES: dict[Role, tuple[str, ...]] = {
    "read": (
        "GET /metrics",
        "GET /docs",
        "GET /docs/oauth2-redirect",
        "GET /redoc",
        "GET /openapi.json",
        "POST /v1/recommendations",
        "POST /v1/scores",
        "POST /v1/reward/scores",
        "GET /v1/reward",
        "GET /v1/reward/{ref:path}",
        "GET /v1/interactions/stats",
        "GET /v1/experiments",
        "GET /v1/users/{user:path}/history",
        "GET /v1/items/{item:path}",
        "GET /v1/imports/{job_id}/rejects",
        "GET /v1/datasets/{ref:path}/pages",
        "GET /v1/catalogs",
        "GET /v1/catalogs/current/items/{item:path}",
        "GET /v1/catalogs/current/codes/{codes}",
        "GET /v1/catalogs/current/tree",
        "GET /v1/catalogs/current/search",
        "GET /v1/catalogs/{ref:path}/report",
        "GET /v1/negatives",
        "GET /v1/negatives/beams/{ref:path}",
        "GET /v1/models",
        "GET /v1/models/{ref:path}",
        "GET /v1/recipes",
        "GET /v1/serving/live",
        "GET /v1/serving/variants",
        "GET /v1/serving/candidates",
        "GET /v1/serving/decisions",
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/metrics",
        "GET /v1/jobs/{job_id}/report",
        "GET /v1/artifacts",
        "GET /v1/cluster",
        "GET /v1/artifacts/{kind}/{digest}",
    ),
    "write": (
        "POST /v1/interactions",
        "POST /v1/items",
        "DELETE /v1/items/{item:path}",
        "POST /v1/imports",
        "PUT /v1/uploads/{name:path}",
        "DELETE /v1/uploads/{name:path}",
    ),
    "admin": (
        "POST /v1/jobs",
        "POST /v1/jobs/{job_id}/cancel",
        "POST /v1/jobs/{job_id}/resume",
        "GET /v1/jobs/{job_id}/log",
        "GET /v1/queues",
        "POST /v1/queues/{queue}/requeue",
        "POST /v1/serving/promote",
        "POST /v1/serving/rollback",
        "DELETE /v1/serving/retriever",
        "PUT /v1/serving/variants",
        "GET /v1/audit",
        "DELETE /v1/users/{user:path}",
        "GET /v1/users/{user:path}/export",
        "GET /v1/deletions",
    ),
}
"""Method and path, as the routes themselves say it, by role."""

AUDITED_READS = ("GET /v1/users/{user:path}/export",)
"""Reading that the audit log keeps, since personal data leave by it. What else it keeps is every change that wants an admin."""


_USER = re.compile(r"/v1/users/(.+?)(/history|/export|)\Z", re.DOTALL)


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+(?::path)?\})", template)
    return re.compile("".join((".*" if part.endswith(":path}") else "[^/]+") if part.startswith("{") else re.escape(part) for part in parts), re.DOTALL)


@cache
def _tables() -> tuple[dict[str, Role], tuple[tuple[re.Pattern[str], Role, str], ...]]:
    said = [(route, role) for role, routes in ROUTES.items() for route in routes]
    return {route: role for route, role in said if "{" not in route}, tuple((_pattern(route), role, route) for route, role in said if "{" in route)


def needed_role(method: str, path: str) -> Role:
    """The role that a request wants; the strongest, where a path could be that of several routes."""
    route = f"{'GET' if method == 'HEAD' else method} {path}"
    plain, patterns = _tables()
    if (role := plain.get(route)) is not None:
        return role
    return max((role for pattern, role, _ in patterns if pattern.fullmatch(route)), key=ROLES.index, default="admin")


def without_user(path: str) -> str:
    """A path fit for a log: no person can be told from it."""
    return _USER.sub(r"/v1/users/{user}\2", path)


def audited(method: str, path: str) -> bool:
    """Whether the audit log keeps what comes of a request."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return any(_pattern(route).fullmatch(f"GET {path}") for route in AUDITED_READS)
    return needed_role(method, path) == "admin"

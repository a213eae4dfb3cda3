"""The operator's process before the cluster is as it needs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from semantide.operators.settings import OperatorSettings


def test_it_heeds_the_end_while_it_waits_for_its_resources(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listened to
        named = {"clusters": "cluster", "users": "user", "contexts": "context"}
        bodies = {
            "cluster": {"server": f"http://127.0.0.1:{nobody.getsockname()[1]}"},
            "user": {"token": "none"},
            "context": {"cluster": "nowhere", "user": "nowhere"},
        }
        lists = {several: [{"name": "nowhere", one: bodies[one]}] for several, one in named.items()}
        (tmp_path / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "nowhere", **lists}))
        path = os.pathsep.join(place for place in sys.path if place)
        process = subprocess.Popen(
            [sys.executable, "-m", "semantide.operators"],
            env={**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig"), "PYTHONPATH": path, "SEMANTIDE_OPERATOR_PORT": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        said = ""
        try:
            while "cannot be listed" not in said:
                said = process.stderr.readline()
                assert said, "it ended by itself"
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in rest


@pytest.mark.parametrize("seconds", [0, 61, 120])
def test_rounds_are_frequent_enough_for_the_health_check(seconds: float) -> None:
    with pytest.raises(ValueError, match="round_seconds"):
        OperatorSettings(round_seconds=seconds)

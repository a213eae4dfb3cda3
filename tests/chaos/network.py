"""The way to a port of this machine, cut by the kernel: packets of real connections vanish, and nobody is told."""

from __future__ import annotations

import os
import shutil
import subprocess


def missing() -> str:
    """Why no way can be cut here; empty where it can."""
    if os.geteuid() != 0 or not shutil.which("iptables"):
        return "cutting a network takes root and iptables"
    found = subprocess.run(["iptables", "-w", "-L", "INPUT", "-n"], check=False, capture_output=True, text=True)
    return "" if found.returncode == 0 else found.stderr.strip()


class Cut:
    """What is sent to or from a port over loopback vanishes until ``mend``."""

    def __init__(self, port: int) -> None:
        self._rules = [["INPUT", "-i", "lo", "-p", "tcp", way, str(port), "-j", "DROP"] for way in ("--dport", "--sport")]
        for rule in self._rules:
            subprocess.run(["iptables", "-w", "-I", *rule], check=True)

    def mend(self) -> None:
        """Let them through again."""
        for rule in self._rules:
            subprocess.run(["iptables", "-w", "-D", *rule], check=True)
        self._rules = []

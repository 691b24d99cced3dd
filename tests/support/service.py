"""A real service in processes of its own: the command line, Ray, gRPC, HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

PROGRAM = str(Path(sys.executable).with_name("twinspark"))
START_S = 120
STOP_S = 60


class Service:
    """One `twinspark serve` with its own state folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.state = folder / "state"
        self.output = folder / "serve.out"
        command = [PROGRAM, "serve", *arguments, "--state", str(self.state)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache"), "COLUMNS": "400"}
        with self.output.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    @property
    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        found = re.search(r"ready at (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    def until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Waits for a condition, bounded, while the service lives."""
        give_up_at = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"the service ended:\n{self.said}"
            assert time.monotonic() < give_up_at, f"not within {within_s} s:\n{self.said}"
            time.sleep(0.05)

    def until_ready(self, within_s: float = START_S) -> None:
        self.until(lambda: "ready at" in self.said, within_s)
        self.until(lambda: httpx.get(f"{self.url}/readyz").status_code == 200, within_s)

    def engine_pids(self) -> list[int]:
        """Processes of engine actors below this service."""
        return [pid for pid in descendants(self.process.pid) if "ray::EngineActor" in command_line(pid)]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `twinspark` command on the same state folder."""
        return twinspark(*arguments, "--state", str(self.state))

    def end(self) -> None:
        below = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in below:
            if "ray" in command_line(pid):
                os.kill(pid, signal.SIGKILL)


def twinspark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One `twinspark` command, to its end."""
    environment = {**os.environ, "COLUMNS": "400"}
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})

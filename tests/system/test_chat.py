"""`twinspark chat` in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.service import PROGRAM, Service, twinspark

WAIT_S = 60


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches whom it should
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> None:
        """Waits until the text has appeared since the last wait."""
        seen, give_up_at = "", time.monotonic() + WAIT_S
        while text not in seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, give_up_at - time.monotonic()))
            assert ready, f"no {text!r} within {WAIT_S} s in:\n{self.screen}"
            seen += os.read(self._master, 65536).decode(errors="replace")
        self.screen += seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextmanager
def chat(service: Service, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(PROGRAM, "chat", "--state", str(service.state), *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


def test_an_answer_streams_with_its_speed_and_the_next_turn_is_cached(service: Service) -> None:
    with chat(service, "--no-think", "--max-tokens", "5") as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("tok/s")
        terminal.type("/quit\n")
        assert terminal.process.wait(WAIT_S) == 0


def test_interrupting_an_answer_keeps_the_conversation(service: Service) -> None:
    with chat(service, "--max-tokens", "20000") as terminal:
        terminal.until("> ")
        terminal.type("go on for long\n")
        terminal.until("\n")
        terminal.type("\x03")
        terminal.until("interrupted")
        terminal.type("/new\n")
        terminal.until("new conversation")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT_S) == 0


def test_without_a_service_it_says_how_to_start_one(service: Service, tmp_path: object) -> None:
    refused = twinspark("chat", "--state", str(tmp_path))
    assert refused.returncode == 1
    assert "twinspark serve" in refused.stderr


def test_a_service_that_is_gone_is_reported_and_the_prompt_comes_back(service: Service) -> None:
    with chat(service, "--url", "http://127.0.0.1:1") as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("does not answer")
        terminal.until("> ")

"""One running service for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    started = Service(tmp_path_factory.mktemp("service"), "--demo", "--port", "0", "--dashboard-port", "0")
    try:
        started.until_ready()
        yield started
    finally:
        started.end()

"""What every API's routes work with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.router import Router


@dataclass(frozen=True)
class Service:
    """The engines and how to serve them.

    Attributes:
        keepalive_s: silence after which a stream says that it is alive, lest somebody on the way gives it up.
        started: when, in seconds since 1970.
    """

    router: Router
    keepalive_s: float
    started: int = field(default_factory=lambda: int(time.time()))

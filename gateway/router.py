"""Which engine a request goes to, and whether there is one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.chat.replay import CallMemory
from gateway.chat.tokens import ChatTokenizer, VocabularyError
from gateway.engines import EngineClient
from gateway.errors import Fault, GatewayError
from gateway.proto import engine_pb2 as pb

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0


@dataclass(frozen=True)
class EngineAddress:
    """An engine that serves, as the cluster announces it."""

    engine_id: str
    address: str
    secret: str


@dataclass(frozen=True)
class ModelInfo:
    """The model all engines serve; ``name`` is its id in the APIs, ``calls`` what it has called lately."""

    name: str
    fingerprint: str
    context_tokens: int
    tokenizer: ChatTokenizer
    calls: CallMemory


def least_loaded(engines: Sequence[EngineClient]) -> EngineClient | None:
    """The engine with the fewest streams of ours; the first of equals."""
    return min(engines, key=lambda engine: engine.streams, default=None)


def model_id(name: str) -> str:
    """A model's name as an id: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "model"


class Router:
    """The engines of one service. Lives on one asyncio loop.

    The cluster tells it which engines there are, and in words what is going on while there is none.
    """

    def __init__(self) -> None:
        self._engines: dict[EngineAddress, EngineClient] = {}
        self._model: ModelInfo | None = None
        self._message = "starting"
        self._draining = False
        self._closing: set[asyncio.Task[None]] = set()

    async def set_engines(self, addresses: Sequence[EngineAddress]) -> None:
        """Takes the given engines into use and gives the others up.

        Raises:
            GatewayError: an engine cannot be asked what it serves.
            VocabularyError: its tokenizer is of another kind.
        """
        for address in [known for known in self._engines if known not in addresses]:
            self._close(self._engines.pop(address))
        for address in addresses:
            if address not in self._engines:
                client = EngineClient(address.address, address.secret)
                try:
                    await self._describe(client)
                except (GatewayError, VocabularyError):
                    self._close(client)
                    raise
                self._engines[address] = client
                log.info("event=engine_in_use engine=%s address=%s", address.engine_id, address.address)

    def update_state(self, message: str) -> None:
        """What to tell clients while no engine serves."""
        self._message = message

    def start_draining(self) -> None:
        """Takes no further requests."""
        self._draining = True

    @property
    def not_ready(self) -> str | None:
        """Why no request can be served; None when one can."""
        if self._draining:
            return "the service is stopping"
        if not self._engines:
            return f"no engine is ready: {self._message}"
        return None

    @property
    def model(self) -> ModelInfo:
        """The model.

        Raises:
            GatewayError: no engine has told yet.
        """
        if self._model is None:
            raise self._unavailable()
        return self._model

    @property
    def streams(self) -> int:
        """Requests being served."""
        return sum(engine.streams for engine in self._engines.values())

    def pick(self) -> EngineClient:
        """The engine for a new request.

        Raises:
            GatewayError: none serves.
        """
        engine = None if self._draining else least_loaded(list(self._engines.values()))
        if engine is None:
            raise self._unavailable()
        return engine

    async def statuses(self) -> list[pb.EngineStatus]:
        """Status of every engine that answers."""
        answers = await asyncio.gather(
            *(engine.status() for engine in self._engines.values()), return_exceptions=True
        )
        return [answer for answer in answers if isinstance(answer, pb.EngineStatus)]

    async def drain(self, timeout_s: float) -> int:
        """Lets running requests finish; returns how many did not."""
        self.start_draining()
        left = await asyncio.gather(
            *(engine.drain(timeout_s) for engine in self._engines.values()), return_exceptions=True
        )
        return sum(count for count in left if isinstance(count, int))

    async def close(self) -> None:
        """Ends all connections."""
        await self.set_engines([])
        await asyncio.gather(*self._closing)

    async def _describe(self, client: EngineClient) -> None:
        """Learns the model; the tokenizer is built again only for another vocabulary."""
        told = await client.describe()
        if self._model is None or self._model.fingerprint != told.fingerprint:
            tokenizer, calls = await asyncio.to_thread(ChatTokenizer, told.vocabulary), CallMemory()
        else:
            tokenizer, calls = self._model.tokenizer, self._model.calls
        self._model = ModelInfo(model_id(told.name), told.fingerprint, told.context_tokens, tokenizer, calls)

    def _close(self, client: EngineClient) -> None:
        closing = asyncio.create_task(client.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _unavailable(self) -> GatewayError:
        reason = self.not_ready or "no engine has said what it serves"
        return GatewayError(Fault.UNAVAILABLE, reason, retry_after_s=_RETRY_AFTER_S)

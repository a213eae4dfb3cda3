"""The generator that was trained last for each tokenizer, in Redis: whose beams are searched when a job names no model."""

from __future__ import annotations

from typing import Any

_MODELS = "semantide:negatives:models"
_ORDER = "semantide:negatives:order"
_COUNT = "semantide:negatives:count"


class NewestModels:
    """Remembers trained generators by their catalog's tokenizer."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def put(self, tokenizer: str, model: str) -> None:
        """A generator was trained; one that is told of again stays where it was."""
        if self._broker.hget(_MODELS, tokenizer) == model.encode():
            return
        pipe = self._broker.pipeline()
        pipe.hset(_MODELS, tokenizer, model)
        pipe.zadd(_ORDER, {tokenizer: self._broker.incr(_COUNT)})
        pipe.execute()

    def find(self, tokenizer: str | None = None) -> str | None:
        """The newest generator of a tokenizer, or of all."""
        if tokenizer is None:
            last = self._broker.zrevrange(_ORDER, 0, 0)
            if not last:
                return None
            tokenizer = last[0].decode()
        value = self._broker.hget(_MODELS, tokenizer)
        return value.decode() if value else None

    def all(self) -> dict[str, str]:
        """Tokenizer to model."""
        return {tokenizer.decode(): model.decode() for tokenizer, model in self._broker.hgetall(_MODELS).items()}

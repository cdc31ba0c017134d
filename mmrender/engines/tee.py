"""vLLM's generate route read as a stream, for a backend that asks for the whole answer.

The backend's request goes out with `stream`; its chunks are told of as they come, and put together to the
answer that the route gives otherwise. So everything that a backend knows - images, errors, checks - holds for
streams too. Chunks: `entrypoints/scale_out/token_in_token_out/protocol.py` of vLLM 0.32.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from mmrender.client.completions import checked_completion
from mmrender.client.transport import Reply, Transport
from mmrender.client.vllm_reply import entries_of
from mmrender.engines.interface import OnTokens
from mmrender.engines.sse import events
from mmrender.errors import EngineError, EngineReplyError

GENERATE_PATH: Final = "/inference/v1/generate"
_ENDS: Final = ("stop", "length")


class TeeTransport:
    """A transport that tells of tokens as they come.

    Args:
        transport: The way to the server.
        on_tokens: Told of the tokens of its generate requests, once checked; its method `ended`, where it has
            one, is told why they ended.
        vocab_size: Ids at or above it are refused; None where it is not known.

    Attributes:
        beneath: The way to the server, by which others know what is known about it.
    """

    def __init__(self, transport: Transport, on_tokens: OnTokens, vocab_size: int | None = None) -> None:
        self.beneath = transport
        self._on_tokens = on_tokens
        self._vocab_size = vocab_size

    @property
    def base_url(self) -> str:
        """Root of the server."""
        return self.beneath.base_url

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        idempotent: bool | None = None,
    ) -> Reply:
        """Send a request; generate requests as streams."""
        if path != GENERATE_PATH:
            return await self.beneath.request(
                method, path, json=json, headers=headers, timeout=timeout, idempotent=idempotent
            )
        streamed = {**json, "stream": True, "stream_options": {"include_usage": True}}
        lines = self.beneath.stream(method, path, json=streamed, headers=headers)
        whole = Whole(self._vocab_size)
        try:
            async for chunk in events(lines, where=f"{self.base_url}{path}"):
                self._tell(*whole.take(chunk), whole.finish_reason)
        except EngineError:
            if whole.finish_reason not in _ENDS:  # else only the usage can be missing
                raise
        return Reply(200, {}, msgspec.json.encode(whole.reply()))

    def _tell(self, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        if ids:
            self._on_tokens(ids, logprobs)
        ended = getattr(self._on_tokens, "ended", None)
        if ended is not None and reason in _ENDS:
            ended(reason)

    def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """Pass a stream on as it is."""
        return self.beneath.stream(method, path, json=json, headers=headers)

    async def aclose(self) -> None:
        """Close the transport."""
        await self.beneath.aclose()


class Whole:
    """Chunks of a generate stream, put together.

    Args:
        vocab_size: Ids at or above it are refused; None where it is not known.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._head: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"index": 0, "token_ids": [], "finish_reason": None}
        self._entries: list[Any] = []

    def take(self, chunk: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Take a chunk; return its tokens and their logprobs.

        Raises:
            EngineReplyError: The engine reports an error, or a token comes without its finite logprob.
        """
        if "error" in chunk:
            raise EngineReplyError("the engine failed within a stream", got=repr(chunk["error"])[:300])
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._head[name] = value
        ids: list[int] = []
        logprobs: list[float] = []
        for choice in chunk.get("choices") or ():
            tokens = choice.get("token_ids") or []
            entries = entries_of(choice, tokens, "choices[0]")
            checked, values = checked_completion(
                tokens, [entry.get("logprob") for entry in entries], self._vocab_size, where="choices[0]"
            )
            ids += checked
            logprobs += values
            self._entries += entries
            for name, value in choice.items():
                if name not in ("index", "token_ids", "logprobs") and value is not None:
                    self._choice[name] = value
        self._choice["token_ids"] += ids
        return ids, logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the completion ended; None as long as no chunk has said so."""
        reason: str | None = self._choice["finish_reason"]
        return reason

    def reply(self) -> dict[str, Any]:
        """The answer as the route gives it without `stream`."""
        choice = {**self._choice, "logprobs": {"content": self._entries}}
        return {**self._head, "choices": [choice]}

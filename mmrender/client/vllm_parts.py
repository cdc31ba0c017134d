"""Images that a vLLM server processes itself: sent encoded once, and from then on named by their uuid.

The server looks a uuid up before its engine sees the request. So a uuid that it does not know is an error of
that request alone, whatever its cache is: off, of any kind, of one process or of many. A hash in the place of
tensors has no such answer, and is fatal to an engine with another cache.

The reply to a request that brings an image shows the prompt as the server widened it, which must equal ours.
From then on the uuid stands for that widening, and the number of the prompt's tokens must be ours.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mmrender.client.exchange import Ids, check_size, data_url
from mmrender.client.reply import FailedInEngineError, PromptNotShownError
from mmrender.client.server_facts import ServerFacts
from mmrender.client.transport import JSONText
from mmrender.client.types import EngineRequest
from mmrender.client.vllm_images import GENERATE_PATH, SIZE_SETTING
from mmrender.errors import EngineError, EngineStatusError
from mmrender.sidecar import MediaSpan, collapse

_log = logging.getLogger("mmrender.client")
_UNKNOWN: Final = "but data is not provided"
"""Of the error by which vLLM refuses a uuid that its processor's cache lacks."""


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """The images of a prompt as encoded images, or as the uuids of images that the server was sent.

    Attributes:
        request: The prompt with its sidecar.
        facts: Facts about the server.
        ids: The prompt, placeholders widened, of shape `(n,)`.
        spans: Items in prompt order.
        max_bytes: The longest body that the server's frontend takes. None for no bound.
        is_packed: Whether images go as PNG. They go uncompressed otherwise, which takes less time.
    """

    request: EngineRequest
    facts: ServerFacts
    ids: Ids
    spans: Sequence[MediaSpan]
    max_bytes: int | None
    is_packed: bool = True

    @property
    def names(self) -> list[str]:
        """The uuid of each item. It differs from the hash of an item that goes as tensors."""
        return [f"{span.item.identity}-image" for span in self.spans]

    @property
    def known(self) -> set[str]:
        """The uuids of images that the server was sent and is expected to know."""
        hashes = self.facts.hashes
        return {name for name in self.names if hashes.get(name)} if self.facts.recall.is_usable else set()

    @property
    def may_be_named(self) -> bool:
        """Whether the server is expected to know images again, and to widen the prompt's placeholders alone.

        A pad token that the model sampled would be one more placeholder to it.
        """
        pads = {int(self.ids[span.start]) for span in self.spans}
        count = sum(np.count_nonzero(self.ids == pad) for pad in pads)
        is_dense = all(span.range.num_embeds == span.range.length for span in self.spans)
        return self.facts.recall.is_usable and is_dense and count == sum(s.range.length for s in self.spans)

    @property
    def after_miss(self) -> Collection[str]:
        """Images whose data is left out once the server did not know one: none."""
        return ()

    def prompts(self, known: Collection[str] | None) -> list[dict[str, Any]]:
        """Return the members for tokens and images of the one request, without the data of `known` images.

        Raises:
            EngineUnsupportedError: The body is larger than the frontend takes.
            PlaceholderError: A range cannot be put back to the template's placeholder.
        """
        request = self.request
        prompt = request.prompt_ids if isinstance(request.prompt_ids, list) else self.ids.tolist()
        ids = collapse(prompt, request.multi_modal_data, request.placeholder_ids, self.spans)
        parts: list[dict[str, Any]] = []
        data: list[JSONText] = []
        for name, span in zip(self.names, self.spans, strict=True):
            part: dict[str, Any] = {"type": "image_url", "uuid": name}
            if name not in (known or ()):
                part["url"] = data_url(span.item, is_sent_once=not self.is_packed)
                data.append(part["url"])
            parts.append(part)
        if self.max_bytes is not None:
            check_size(len(ids), data, self.max_bytes, where=GENERATE_PATH, setting=SIZE_SETTING)
        return [{"token_ids": ids, "content_parts": parts, **({"return_token_ids": True} if data else {})}]

    def may_be_miss(self, error: EngineError) -> bool:
        """Whether a request failed because the server did not know a uuid.

        Its frontend says so. If frontend and engine have dropped different images, it is a failure like any
        other, and if the cache is off, another refusal. Then tensors go if they can, since it knows no uuid.
        """
        if isinstance(error, EngineStatusError):
            return error.status == 500 or (error.status == 400 and (self.is_packed or _UNKNOWN in error.body))
        return isinstance(error, FailedInEngineError)

    def is_refused_by(self, error: EngineError) -> bool:
        """Whether the server may take no encoded images, or not these."""
        return isinstance(error, PromptNotShownError) or (
            isinstance(error, EngineStatusError) and error.status == 400
        )

    def note(self, *, left_out: bool, knew: bool) -> None:
        """Note an answered request, or one that the server did not know an image of."""
        for name in self.names:
            self.facts.hashes.put(name, True) if knew else self.facts.hashes.pop(name)
        if left_out:
            self.facts.recall.note(knew=knew)

    def note_refusal(self, error: EngineError) -> None:
        """Note that the server answered the same request with tensors in place of images."""
        self.facts.recall.refusal = str(error)
        _log.info("%s: images are sent as tensors", error)

"""Images that a vLLM server processes itself: sent encoded once, and from then on named by their uuid.

The server looks a uuid up before its engine sees the request. So a uuid that it does not know is an error of
that request alone, whatever its cache is: off, of any kind, of one process or of many. A hash in the place of
tensors has no such answer, and is fatal to an engine with another cache.

The reply to a request that brings an image shows the prompt as the server widened it, which must equal ours.
From then on the uuid stands for that widening, and the number of the prompt's tokens must be ours.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from mmcodecs.errors import CodecError
from mmrender.client.exchange import Ids, ImageForm, check_size, data_url
from mmrender.client.reply import FailedInEngineError, PromptNotShownError
from mmrender.client.server_facts import Process, ServerFacts
from mmrender.client.transport import JSONText, Transport
from mmrender.client.types import EngineRequest
from mmrender.client.vllm_images import GENERATE_PATH, SIZE_SETTING
from mmrender.client.vllm_render import RENDER_PATH, compare_item, render_item
from mmrender.errors import EngineError, EngineMismatchError, EngineStatusError, EngineUnsupportedError
from mmrender.media.encoded import coding_of, probe_of
from mmrender.media.load import Coding
from mmrender.media.processors.patches import PatchItem
from mmrender.media.vllm_items import decode_mm_kwargs_item
from mmrender.sidecar import MediaItem, MediaSpan, collapse

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
        originals: Identities of the items that go as the bytes they were decoded from, which takes least.
    """

    request: EngineRequest
    facts: ServerFacts
    ids: Ids
    spans: Sequence[MediaSpan]
    max_bytes: int | None
    is_packed: bool = True
    originals: Collection[str] = ()

    @property
    def names(self) -> list[str]:
        """The uuid of each item. It differs from the hash of an item that goes as tensors."""
        return [f"{span.item.identity}-image" for span in self.spans]

    @property
    def known(self) -> set[str]:
        """The uuids of images that the server was sent and is expected to know."""
        hashes = self.facts.hashes
        return {name for name in self.names if hashes.get(name)} if self.facts.recall.is_usable else set()

    async def requests(self, *, anew: bool = False) -> list[dict[str, Any]]:
        """Return `prompts` without the data of known images, or `anew` with all data."""
        known = set() if anew else self.known
        new = [span.item for name, span in zip(self.names, self.spans, strict=True) if name not in known]
        if all(self._form_of(item) == "original" for item in new):  # a thread would take longer
            return self.prompts(known)
        return await asyncio.to_thread(self.prompts, known)

    @property
    def may_be_named(self) -> bool:
        """Whether the server is expected to know images again, and to widen the prompt's placeholders alone.

        A pad token that the model sampled would be one more placeholder to it.
        """
        pads = {int(self.ids[span.start]) for span in self.spans}
        count = sum(np.count_nonzero(self.ids == pad) for pad in pads)
        is_dense = all(span.range.num_embeds == span.range.length for span in self.spans)
        return self.facts.recall.is_usable and is_dense and count == sum(s.range.length for s in self.spans)

    def prompts(self, known: Collection[str]) -> list[dict[str, Any]]:
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
            if name not in known:
                part["url"] = data_url(span.item, self._form_of(span.item))
                data.append(part["url"])
            parts.append(part)
        if self.max_bytes is not None:
            check_size(len(ids), data, self.max_bytes, where=GENERATE_PATH, setting=SIZE_SETTING)
        return [{"token_ids": ids, "content_parts": parts, **({"return_token_ids": True} if data else {})}]

    def _form_of(self, item: MediaItem) -> ImageForm:
        if self.is_packed:
            return "packed"
        return "original" if item.identity in self.originals else "bitmap"

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


async def decoded_alike(plan: PartsPlan, process: Process) -> frozenset[str]:
    """Return the identities of the plan's new items whose original bytes the server decodes as we do.

    It is asked once for each coding, by noise that it renders.
    """
    known, model, alike = plan.known, plan.request.model, set()
    for name, span in zip(plan.names, plan.spans, strict=True):
        item = span.item
        coding = None if name in known else coding_of(item)
        if coding is not None and isinstance(item, PatchItem):
            key = ("decoder", model, item.layout, item.arithmetic, coding)
            ask = partial(_decodes_alike, item, coding, model, process.transport)
            if await process.ask_once(key, ask):
                alike.add(item.identity)
    return frozenset(alike)


async def _decodes_alike(item: PatchItem, coding: Coding, model: str, transport: Transport) -> bool:
    """Let the server render noise in a coding, and compare its tensors with ours."""
    image, expected = await asyncio.to_thread(probe_of, item, coding)
    where = f"{transport.base_url}{RENDER_PATH}"
    try:
        served = await render_item(transport, model, image.data_url)
        theirs = decode_mm_kwargs_item(served.item)
        form = await asyncio.to_thread(compare_item, expected, theirs, True, where)
    except (CodecError, EngineMismatchError, EngineStatusError, EngineUnsupportedError) as error:
        if isinstance(error, EngineStatusError) and error.status != 400:
            raise
        _log.info("%s: images in %s are sent uncompressed: %s", transport.base_url, coding, error)
        return False
    return form.pixels != "bfloat16"  # which does not tell two neighbouring levels apart

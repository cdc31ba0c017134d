"""Images through a Dynamo frontend: vLLM's generate route, which it passes on to vLLM workers as it is."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from mmrender.client.backend import EngineRequest, EngineResponse
from mmrender.client.checks import Ids, Placed
from mmrender.client.dynamo_reply import experts_of
from mmrender.client.dynamo_request import check_size
from mmrender.client.transport import Transport
from mmrender.client.vllm_call import GENERATE_PATH, GenerateCall
from mmrender.client.vllm_features import PixelDtype, WireForm, features_of, layout_for
from mmrender.errors import EngineUnsupportedError
from mmrender.media.item import tensor_specs


async def generate_with_images(
    request: EngineRequest,
    transport: Transport,
    ids: Ids,
    placed: Sequence[Placed],
    *,
    pixels: PixelDtype | None,
    max_bytes: int,
) -> EngineResponse:
    """Sample one completion of a prompt with images.

    Args:
        request: What is asked.
        transport: The way to the frontend.
        ids: The prompt, of shape `(n,)`.
        placed: Its images in prompt order.
        pixels: Which pixels the workers take.
        max_bytes: The largest body.

    Raises:
        EngineUnsupportedError: The frontend does not serve the route, it is not known which pixels the
            workers take, or the images are too large.
        EngineError: As for `VLLMBackend.generate`.
    """
    if pixels is None:
        raise EngineUnsupportedError(
            "a Dynamo frontend renders nothing, so it is not known which pixels its workers take",
            where="images",
            remedy="Say it with DynamoBackend(pixels='uint8'), or 'float32' for vLLM workers that run with "
            "--no-mm-device-do-normalize",
        )
    for entry in placed:
        if entry.modality != "image":
            raise EngineUnsupportedError(
                "only images can be sent to this engine", where=entry.where, got=entry.modality
            )
    forms = {
        entry.item.identity: WireForm(layout_for(tensor_specs(entry.item), entry.modality), pixels)
        for entry in placed
    }
    features = await asyncio.to_thread(features_of, placed, forms)
    check_size({"token_ids": request.prompt_ids, "features": features}, max_bytes, where=GENERATE_PATH)
    # The frontend has no route that aborts; closing the connection does.
    call = GenerateCall(request, transport, ids, placed, aborts=False)
    try:
        reply = await call.post({"features": features})
    except EngineUnsupportedError as error:
        raise EngineUnsupportedError(
            "the Dynamo frontend does not take images for this model",
            where=error.where,
            got=str(error.__cause__),
            remedy="Start the frontend with DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1, and vLLM workers, which "
            "advertise the route; GET /v1/models lists the models that are served at all",
        ) from error
    return _read(call, reply)


def _read(call: GenerateCall, reply: Any) -> EngineResponse:
    """Read the answer as vLLM's but for router choices, which a frontend passes on in its own form."""
    experts = _taken_experts(reply)
    without = dataclasses.replace(call.request, routed_experts=False, routed_experts_prompt_start=None)
    response = dataclasses.replace(call, request=without).read(reply)
    if not call.request.routed_experts:
        return response
    return dataclasses.replace(
        response, routed_experts=experts_of(experts, call.request, where="choices[0].routed_experts")
    )


def _taken_experts(reply: Any) -> Any:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0].pop("routed_experts", None)
    return None

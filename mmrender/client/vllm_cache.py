"""Whether images may be left out of a request: only where the server's cache is known to bear it.

A hash without data hits vLLM's processor cache where that is of the kind `lru`, in one API process and one
data-parallel rank. With the cache off, of kind `shm`, or behind several API processes, the engine exits.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from mmrender.client.transport import Transport
from mmrender.errors import EngineReplyError, EngineStatusError, EngineUnsupportedError

INFO_PATH: Final = "/server_info?config_format=json"


async def cache_refusal(transport: Transport) -> str | None:
    """Ask the server how it caches images; return what stands against leaving them out, None if nothing.

    Raises:
        EngineUnsupportedError: The server does not say: it runs without VLLM_SERVER_DEV_MODE=1.
        EngineReplyError: Its answer is not to be understood.
        EngineError: It could not be asked.
    """
    where = f"{transport.base_url}{INFO_PATH}"
    try:
        reply = await transport.request("GET", INFO_PATH)
    except EngineStatusError as error:
        if error.status not in (403, 404, 405):
            raise
        raise EngineUnsupportedError(
            "the server does not say how it caches images, and some settings make a hash without data fatal",
            where=where,
            got=f"status {error.status}",
            remedy="Start vLLM with VLLM_SERVER_DEV_MODE=1, or vouch for its cache (lru, one API process, "
            "one data-parallel rank): VLLMBackend(images='hash_only', trust_cache=True)",
        ) from error
    try:
        config = msgspec.json.decode(reply.body)["vllm_config"]
        return _refusal(config["model_config"]["multimodal_config"] or {}, config["parallel_config"])
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise EngineReplyError(
            "the server's configuration is not to be understood",
            where=where,
            expected="vllm_config with model_config.multimodal_config and parallel_config",
            got=f"{type(error).__name__}: {error}",
        ) from error


def _refusal(multimodal: Mapping[str, Any], parallel: Mapping[str, Any]) -> str | None:
    if not multimodal.get("mm_processor_cache_gb"):
        return "its processor cache is off"
    if multimodal.get("mm_processor_cache_type") != "lru":
        return f"its processor cache is of kind {multimodal.get('mm_processor_cache_type')!r}"
    for name, what in (
        ("_api_process_count", "API processes"),
        ("data_parallel_size", "data-parallel ranks"),
    ):
        if parallel[name] != 1:
            return f"it runs {parallel[name]} {what}"
    return None

"""verl without a GPU: what its trainer lacks on a CPU, as plug-ins of verl's own registries.

`VERL_USE_EXTERNAL_MODULES=grpo.verl_cpu` imports this module in each of verl's processes. Three things are
replaced. The device: a platform whose tensors are the CPU's and whose collectives are gloo's. The rollout
server, which is vLLM or SGLang with a GPU: an actor with a Transformers model, behind the calls of verl's
`RolloutReplica`. The adapter, through which verl's actor hands its weights to the server: they travel by Ray.
Everything else is verl's: trainer, FSDP engine, agent loops, load balancer, transfer queue, losses. One fault
of verl 0.9.1 is mended: a batch of rows of one length, with positions of three axes, which these games have.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import ray
import torch
import verl.utils.distributed
import verl.utils.tensordict_utils
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

ROLLOUT = "transformers"
"""Name of this rollout server in verl's configuration."""
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the device for which verl has registered its FSDP engine
    "VERL_USE_EXTERNAL_MODULES": __name__,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process for each of the places below, most of them idle
}
"""Environment of all of verl's processes."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SETTINGS: dict[str, Any] = {
    "actor_rollout_ref.model.use_remove_padding": False,  # it needs flash attention
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    f"{_ACTOR}.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.dtype": "float32",
    f"+{_ACTOR}.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32}",
    f"{_ACTOR}.fsdp_config.use_torch_compile": False,
    f"{_ACTOR}.use_torch_compile": False,
    f"{_ROLLOUT}.name": ROLLOUT,
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.load_format": "safetensors",
    f"{_ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.device": "cpu",
    "+ray_kwargs.ray_init.address": "local",  # never another program's
    "ray_kwargs.ray_init.num_cpus": 16,  # places, not cores: each of verl's actors takes one
    "+ray_kwargs.ray_init.num_gpus": 1,
    "+ray_kwargs.ray_init.include_dashboard": False,
}
"""verl's settings without a GPU, as overrides of its configuration."""
FROZEN = "GRPO_FROZEN_AFTER"
"""Environment variable: the server keeps its weights after this step, which a comparison must find."""


class _Device(ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls for memory. There is none to free."""

    def __getattr__(self, name: str) -> Any:
        if name in ("empty_cache", "ipc_collect", "set_device", "set_per_process_memory_fraction"):
            return lambda *_: None
        if name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            return lambda *_: 0
        values = {"mem_get_info": lambda *_: (0, 1), "get_device_name": lambda *_: "cpu"}
        values |= {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}
        return values[name] if name in values else getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """The CPU, as a device of verl's. Ray counts it as a GPU, since verl places its workers by them."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("torch.cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class Server:
    """Samples as verl's vLLM server does: tokens and images in, tokens and raw log-probabilities out.

    Args:
        directory: The model's.
        max_model_len: Number of tokens of a prompt and its completion.
    """

    def __init__(self, directory: str, max_model_len: int) -> None:
        from mmrender import Renderer
        from mmrender.client.engine import ModelTokens
        from mmrender.client.local import LocalBackend

        self._renderer = Renderer.from_pretrained(directory)
        self._placeholders = ModelTokens(self._renderer).placeholder_ids
        self._backend = LocalBackend(directory, max_model_len=max_model_len)
        self._frozen_after = int(os.environ.get(FROZEN, "0")) or 1 << 40
        self._step = 0

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
    ) -> TokenOutput:
        """Sample one completion."""
        from mmrender.client.types import EngineRequest

        ids, media = self._widened(prompt_ids, image_data or [])
        response = await self._backend.generate(
            EngineRequest("", ids, self._sampling(sampling_params), uuid.uuid4().hex, media)
        )
        return TokenOutput(
            token_ids=list(response.completion_ids),
            log_probs=list(response.logprobs),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self._step},
        )

    def _widened(self, prompt_ids: list[int], images: list[Any]) -> tuple[list[int], Any]:
        """Return a prompt with as many tokens for each image as its processor says, as vLLM widens it."""
        from mmrender.media.load import load_image
        from mmrender.sidecar import MultiModalData, PlaceholderRange
        from mmrender.tokens.expansion import split_expansion

        resolver = self._renderer.media
        assert resolver is not None
        waiting, ids, entries = iter(images), list[int](), []
        for token in prompt_ids:
            if token != self._placeholders["image"]:
                ids.append(token)
                continue
            item = resolver.processor.process(load_image(next(waiting)))
            split = split_expansion(self._renderer.tokenizer, item.expansion)
            entries.append((PlaceholderRange(len(ids), split.length, split.embed_spans), item))
            ids += [each for piece in split.core for each in piece.ids * piece.times]
        return ids, MultiModalData.of(entries)

    def _sampling(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters with limits as biases, which leave log-probabilities over all tokens.

        vLLM's are, and so are those of verl's trainer.
        """
        params = {name: value for name, value in params.items() if name != "logprobs"}
        size = self._backend.model.config.get_text_config().vocab_size
        allowed = params.pop("allowed_token_ids", None)
        banned = {*range(size)} - {*allowed} if allowed else {*self._placeholders.values()}
        return params | {"logit_bias": dict.fromkeys(sorted(banned), -100.0)}

    async def load(self, weights: dict[str, Any], step: int | None) -> None:
        """Take the weights that verl's trainer has after a step."""
        self._step = step or 0
        if self._step <= self._frozen_after:
            named = {name: torch.from_numpy(value) for name, value in weights.items()}
            self._backend.update_weights(named.items(), str(step))


class Replica(RolloutReplica):
    """One server for each worker of the trainer."""

    async def launch_servers(self) -> None:
        """Start the server as an actor of Ray."""
        name = f"{ROLLOUT}_server_{self.replica_rank}"
        length = self.config.prompt_length + self.config.response_length
        server = ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=1024)
        self.servers = [server.remote(self.model_config.path, length)]
        self._server_handle, self._server_address = self.servers[0], name

    async def _nothing(self, *_: Any, **__: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing


class Adapter(BaseRollout):
    """verl's side of the server, in the process of the trainer's worker."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Send the trainer's weights to the server."""
        named = {name: tensor.detach().cpu().numpy() for name, tensor in weights}
        server = ray.get_actor(f"{ROLLOUT}_server_{os.environ['RANK']}")
        await server.load.remote(named, global_steps)


_mark_positions = verl.utils.tensordict_utils.maybe_fix_3d_position_ids


def fix_positions(data: Any) -> None:
    """Say which axis of nested positions varies. Of rows of one length, torch takes the first."""
    positions = data.get("position_ids", None)
    if positions is None or not positions.is_nested or positions.dim() != 3:
        return
    if int(positions.offsets()[-1]) != positions.values().shape[0]:
        _mark_positions(data)
        return
    rows = positions.values().unflatten(0, (len(data), -1)).unbind()
    data["position_ids"] = verl.utils.tensordict_utils.nested_tensor_from_tensor_list(
        list(rows), ragged_idx=2
    )


RolloutReplicaRegistry.register(ROLLOUT, lambda: Replica)
_ROLLOUT_REGISTRY[ROLLOUT, "async"] = f"{__name__}.Adapter"
if os.environ.get("VERL_PLATFORM") == "cpu":  # in verl's processes, before their modules import these
    set_platform(CPUPlatform())
    verl.utils.tensordict_utils.maybe_fix_3d_position_ids = fix_positions
    # verl names a backend for the CPU and one for the device, which are the same here.
    verl.utils.distributed.initialize_global_process_group_ray = partial(
        verl.utils.distributed.initialize_global_process_group_ray, backend="gloo"
    )

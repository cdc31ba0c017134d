"""verl's own worker, client and load balancer around a server with a model in this process."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.rollout.utils import get_vision_placeholder_token_ids, qwen2_5_vl_dedup_image_tokens

from doc_pages import Page


class Handle:
    """An object behind the calls of an actor: `handle.method.remote(...)` gives what may be awaited."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        method = getattr(self._target, name)

        async def call(*args, **kwargs):
            result = method(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs)))


class Server:
    """Samples as verl's vLLM server does, from the signature on, without a cache.

    A completion has `length` tokens, of which the last is the end of the turn, with its own log-probability.
    """

    def __init__(self, model, processor, config, length=5):
        self.model, self.processor, self.config, self.length = model, processor, config, length
        self.requests = []
        self.global_steps = 0
        self.scripted = None  # returns the tokens of a completion, in place of the model's choice

    async def generate(
        self,
        prompt_ids,
        sampling_params,
        request_id,
        image_data=None,
        video_data=None,
        audio_data=None,
        mm_processor_kwargs=None,
        priority=0,
        kv_transfer_params=None,
    ):
        self.requests.append(
            SimpleNamespace(prompt_ids=prompt_ids, sampling_params=dict(sampling_params), id=request_id)
        )
        context = self.config.prompt_length + self.config.response_length
        budget = sampling_params.get(
            "max_tokens", min(self.config.response_length, context - len(prompt_ids))
        )
        temperature = sampling_params["temperature"]
        ids, inputs = self.widened(
            qwen2_5_vl_dedup_image_tokens(prompt_ids, self.processor), image_data or []
        )
        banned = get_vision_placeholder_token_ids(self.processor)
        sampled, logprobs = [], []
        script = None if self.scripted is None else self.scripted()
        for number in range(min(budget, self.length) if script is None else len(script)):
            logits = self.logits([*ids, *sampled], inputs) / (temperature or 1.0)
            allowed = logits.clone()
            allowed[banned] = -torch.inf
            token = int(allowed.argmax() if not temperature else torch.multinomial(allowed.softmax(-1), 1))
            if script is not None:
                token = script[number]
            elif number == self.length - 1:
                token = self.processor.tokenizer.eos_token_id
            sampled.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
        assert sampling_params["logprobs"] is True
        fields = {"global_steps": self.global_steps}
        return TokenOutput(
            token_ids=sampled, log_probs=logprobs, stop_reason="completed", extra_fields=fields
        )

    def widened(self, ids, images):
        """The prompt as the model takes it: vLLM's processor widens each placeholder."""
        pad = self.processor.image_token_id
        inputs = dict(self.processor.image_processor(images=images, return_tensors="pt")) if images else {}
        counts = iter((inputs["image_grid_thw"].prod(-1) // 4).tolist() if images else [])
        ids = [token for each in ids for token in ([pad] * next(counts) if each == pad else [each])]
        assert next(counts, None) is None
        return ids, inputs

    @torch.no_grad()
    def logits(self, ids, inputs):
        ids = torch.tensor([ids])
        types = (ids == self.processor.image_token_id).int()
        return self.model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, -1].float()


def configured(directory, **rollout):
    """verl's configuration of a PPO trainer, for a model directory."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    config = OmegaConf.load(folder / "_generated_ppo_trainer.yaml")
    config.actor_rollout_ref.model.path = str(directory)
    settings = {
        "name": "vllm",
        "prompt_length": 1024,
        "response_length": 256,
        "calculate_log_probs": True,
        **rollout,
    }
    config.actor_rollout_ref.rollout = OmegaConf.merge(config.actor_rollout_ref.rollout, settings)
    return config


def worker_of(config, model, **options):
    """verl's worker for agent loops, the server that it asks, and the load balancer between."""
    worker = AgentLoopWorker(config, None)
    server = Server(model, worker.processor, config.actor_rollout_ref.rollout, **options)
    balancer = GlobalRequestLoadBalancer({"one": Handle(server)})
    worker.llm_client = LLMServerClient(config, Handle(balancer))
    return worker, server, balancer


def page(name):
    """Run the code of a page in a module that can be imported by its name, as Hydra does."""
    module = ModuleType("code_of_a_page")
    sys.modules[module.__name__] = module
    found = Page(name, {"__name__": module.__name__}).run()
    vars(module).update(found)
    return found


def batch_of(agent, seeds, *, step=0, validate=False):
    """Rows of a data set as verl's trainer sends them to the worker."""
    prompts = np.empty(len(seeds), object)
    prompts[:] = [[{"role": "system", "content": "Play."}] for _ in seeds]
    columns = {"raw_prompt": prompts, "agent_name": np.array([agent] * len(seeds)), "index": np.array(seeds)}
    return DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": step, "validate": validate})


@torch.no_grad()
def trainer_logprobs(model, output, temperature):
    """The log-probabilities of the responses as verl's trainer computes them: from the batch alone."""
    rows = []
    for index in range(len(output)):
        row = {
            name: output.batch[name][index : index + 1]
            for name in ("input_ids", "attention_mask", "position_ids")
        }
        images = {
            name: value
            for name, value in output.non_tensor_batch["multi_modal_inputs"][index].items()
            if name in ("pixel_values", "image_grid_thw")
        }
        positions = row["position_ids"].transpose(0, 1)  # (4, 1, n)
        logits = model(row["input_ids"], row["attention_mask"], positions, **images).logits[0].float()
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        start = output.batch["prompts"].shape[1]
        responses = output.batch["responses"][index]
        rows.append(logprobs[start - 1 : -1].gather(-1, responses[:, None])[:, 0])
    return torch.stack(rows)

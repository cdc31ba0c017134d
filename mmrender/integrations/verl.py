"""mmrender's rollouts as verl's agent loops: verl's servers sample them, with verl's weights and settings.

```python
from verl.experimental.agent_loop.agent_loop import register
from find_cell import FindCell                     # of mmrender's examples: an environment with pictures
from mmrender.integrations.verl import EpisodeLoop


@register("find_cell")  # agent_name of the data set
class FindCellLoop(EpisodeLoop):
    environment = FindCell

    def extras(self, row):
        return {"seed": int(row["index"])}
```
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from mmrender.client.exchange import check_request
from mmrender.client.reply import check_tokens
from mmrender.client.sampling import spell, spell_in_process
from mmrender.client.transport import NullTransport, Transport
from mmrender.client.types import (
    EngineRequest,
    EngineResponse,
    FinishReason,
    OnTokens,
    RendererBackend,
    Usage,
)
from mmrender.errors import EngineReplyError, EngineUnsupportedError, PromptTooLongError, TrajectoryError
from mmrender.integrations.verl_model import check_processor_settings, renderer_of
from mmrender.media.encoded import encoded_image
from mmrender.renderer import Renderer
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Environment, run_episode
from mmrender.rollout.rows import TrajectoryID, rows_of, total_reward
from mmrender.sidecar import collapse
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.prefix import media_before
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.truncate import whole_media_length

_log = logging.getLogger("mmrender.integrations")
_ABORTED: Final = ("abort", "aborted")


class ServerBackend(RendererBackend):
    """verl's servers as a backend: every request goes through `server_manager.generate`.

    The prompt is sent as the template wrote it, with one placeholder for each image: verl's servers widen it.

    Args:
        server_manager: verl's client of its servers, which an agent loop has.
        session_id: Requests of one session go to one server.
        response_length: Maximum number of tokens after the first prompt, observations included, by default
            as many as `rollout.prompt_length` and `rollout.response_length` leave.
        options: Further keywords of `server_manager.generate`.

    Attributes:
        seconds: Time that requests took in all.
        num_preempted: Number of times that a server interrupted one, or -1 if servers do not say.
    """

    name: ClassVar[str] = "verl"

    def __init__(
        self,
        server_manager: Any,
        *,
        session_id: str | None = None,
        response_length: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.server_manager = server_manager
        self.session_id = uuid.uuid4().hex if session_id is None else session_id
        self.transport = NullTransport()
        self.seconds, self.num_preempted = 0.0, -1
        self._rollout = server_manager.config.actor_rollout_ref.rollout
        self._response_length = response_length
        self._options = dict(options or {})
        self._end: int | None = None

    async def generate(
        self, request: EngineRequest, transport: Transport | None = None, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion; `transport` is ignored. `on_tokens` is called once, at the end.

        Raises:
            EngineUnsupportedError: A video, or a structured output.
            EngineReplyError: The server's answer is not one logprob for each token.
            PromptTooLongError: No token is left of the response's.
            MMRenderError: As for `RendererBackend.generate`.
        """
        where, count = "server_manager.generate", len(request.prompt_ids)
        _, spans = check_request(request)
        if self._end is None and self._response_length is not None:
            self._end = count + self._response_length
        room = self._context if self._end is None else min(self._context, self._end)
        if count >= room:
            raise PromptTooLongError(count, room - 1, where=where)
        sampling = self._spelled(request)
        budget = sampling["max_tokens"] = min(request.sampling_params["max_tokens"], room - count)
        ids = collapse(list(map(int, request.prompt_ids)), request.multi_modal_data, request.placeholder_ids)
        images = [encoded_image(span.item).image for span in spans]
        began = time.perf_counter()
        output = await self.server_manager.generate(
            request_id=self.session_id,
            prompt_ids=ids,
            sampling_params=sampling,
            image_data=images or None,
            **self._options,
        )
        self.seconds += time.perf_counter() - began
        if output.num_preempted is not None:
            self.num_preempted = max(self.num_preempted, 0) + output.num_preempted
        sampled = list(map(int, output.token_ids))
        logprobs = check_tokens(sampled, output.log_probs or (), request, where=where)
        experts = None
        if request.routed_experts:
            if output.routed_experts is None:
                raise EngineReplyError(
                    "the server sent no router choices",
                    where=where,
                    remedy="Set actor_rollout_ref.rollout.enable_rollout_routing_replay",
                )
            experts = RoutedExperts(np.asarray(output.routed_experts))
        response = EngineResponse(
            completion_ids=sampled,
            logprobs=logprobs,
            finish_reason=_finish_reason(output.stop_reason, sampled, budget, request),
            usage=Usage(count, len(sampled), output.extra_fields.get("num_cached_tokens")),
            routed_experts=experts,
            weight_versions=_versions(output.extra_fields, len(sampled)),
            request_id=self.session_id,
            sampler={"engine": str(self._rollout.name)},
        )
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int:
        """Return the longest prompt that verl's settings leave room for a token. `model` is ignored."""
        return self._context - 1

    @property
    def _context(self) -> int:
        """Number of tokens of prompt and response, as verl's servers bound it."""
        context = int(self._rollout.prompt_length) + int(self._rollout.response_length)
        limit = self._rollout.max_model_len
        return context if limit is None else min(context, int(limit))

    def _spelled(self, request: EngineRequest) -> dict[str, Any]:
        """Return the sampling parameters in the words of the server, which always reports logprobs."""
        if request.sampling_params.get("structured_outputs"):
            raise EngineUnsupportedError(
                "verl's servers do not follow structured outputs",
                where="sampling_params['structured_outputs']",
            )
        if self._rollout.name == "sglang":
            sampling, _ = spell(request.sampling_params, "sglang")
        else:
            sampling = spell_in_process(request.sampling_params)
        sampling.pop("max_new_tokens", None)
        return sampling | {"logprobs": True}


def _finish_reason(
    reported: str | None, sampled: list[int], budget: int, request: EngineRequest
) -> FinishReason:
    """Return why sampling ended. verl reports an end and a cut by one word, `completed`."""
    if reported in _ABORTED:
        return "abort"
    params = request.sampling_params
    stops = {*(params.get("stop_token_ids") or ()), *(request.eos_token_ids or ())}
    if sampled and sampled[-1] in stops and not params.get("ignore_eos"):
        return "stop"
    return "stop" if params.get("stop") and len(sampled) < budget else "length"


def _versions(fields: Mapping[str, Any], count: int) -> tuple[WeightVersionSpan, ...]:
    """Return the trainer's step of the weights that sampled a completion.

    If they changed meanwhile, verl reports the steps of the first and the last token alone.
    """
    first, last = (
        fields.get(name, fields.get("global_steps")) for name in ("min_global_steps", "max_global_steps")
    )
    if first is None or last is None or not count:
        return ()
    if first == last:
        return (WeightVersionSpan(str(first), 0, count),)
    ends = (WeightVersionSpan(str(first), 0, 1), WeightVersionSpan(str(last), count - 1, count))
    return ends if count > 1 else ends[1:]


class EpisodeLoop(AgentLoopBase):
    """An agent loop that plays an environment of mmrender's.

    verl's servers sample each turn, through `server_manager.generate`, with the sampling parameters that verl
    passes, of training or of validation. So each turn has the weights that verl synced last. verl's
    `rollout.prompt_length`, `rollout.response_length`, `rollout.multi_turn.max_assistant_turns` and
    `data.apply_chat_template_kwargs` hold too.

    Attributes:
        environment: Makes the environment of one rollout. A subclass sets it to a class, or in `__init__`.
    """

    environment: Callable[[], Environment]

    def extras(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields that the environment is reset with: by default the row's `extra_info`."""
        return dict(row.get("extra_info") or {})

    @property
    def renderer(self) -> Renderer:
        """The renderer of the model's files, which verl read the tokenizer from."""
        check_processor_settings(self.mm_processor_kwargs)
        return renderer_of(self.tokenizer, self.processor)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **row: Any) -> Any:
        """Play one episode.

        Raises:
            TrajectoryError: Nothing was sampled, for instance since the first prompt is too long.
            MediaError: An image's pixels are not kept, or a turn shows a video.
        """
        rollout = self.rollout_config
        backend = ServerBackend(
            self.server_manager,
            session_id=f"det-{int(priority)}" if rollout.get("full_determinism", False) else None,
            response_length=int(rollout.response_length),
            options={"priority": int(priority)},
        )
        # The backend itself asks for log-probabilities, of which verl has a truth value.
        sampling = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        if rollout.get("ignore_eos", False):
            sampling["ignore_eos"] = True
        client = RendererClient(
            self.renderer,
            backend=backend,
            sampling_params=sampling,
            overlong="stop",
            template_arguments=dict(self.apply_chat_template_kwargs),
            routed_experts=bool(rollout.get("enable_rollout_routing_replay", False)),
        )
        trajectory = Trajectory()
        try:
            await run_episode(
                client,
                self.environment(),
                list(row["raw_prompt"]),
                self.extras(row),
                trajectory=trajectory,
                max_turns=rollout.multi_turn.max_assistant_turns,
            )
        except Exception as error:
            trajectory.error = f"{type(error).__name__}: {error}"
            if not len(trajectory):
                raise
            _log.warning("a rollout failed after %d turns", len(trajectory), exc_info=error)
        output = to_agent_loop_output(
            trajectory, prompt_length=int(rollout.prompt_length), response_length=int(rollout.response_length)
        )
        output.metrics.generate_sequences = backend.seconds
        output.metrics.num_preempted = backend.num_preempted
        return output


def to_agent_loop_output(
    trajectory: Trajectory, *, prompt_length: int | None = None, response_length: int | None = None
) -> Any:
    """Return a rollout's tokens, and its images for verl's own processor.

    verl processes images again. Each is passed in the size that its processor chose, so that its tensors and
    its number of tokens stay the same.

    Args:
        trajectory: The rollout, whose bridged prompts make it one row. If it failed, its mask is 0.
        prompt_length: Maximum number of tokens of the first prompt, which verl pads to.
        response_length: Maximum number of tokens after the first prompt. A longer response is cut before an
            incomplete image, while verl itself would cut within one.

    Raises:
        PromptTooLongError: The first prompt is too long.
        TrajectoryError: Nothing was sampled.
        MediaError: An image's pixels are not kept, or a turn shows a video.
    """
    (row,) = rows_of(trajectory, TrajectoryID(trajectory.trajectory_id), step_wise=False)
    if not row.response_ids:
        raise TrajectoryError(
            "nothing was sampled", where=trajectory.trajectory_id, got=row.error or row.stop_reason
        )
    start = len(row.prompt_token_ids)
    if prompt_length is not None and start > prompt_length:
        remedy = "Raise actor_rollout_ref.rollout.prompt_length, or show smaller images"
        raise PromptTooLongError(start, prompt_length, where="the first prompt", remedy=remedy)
    length = start + len(row.response_ids)
    if response_length is not None and len(row.response_ids) > response_length:
        length = whole_media_length(row.multi_modal_data, start + response_length)
    kept = length - start
    spans = media_before(row.multi_modal_data.spans(), length)
    versions = [
        int(span.version)
        for step in trajectory.steps
        for span in step.weight_versions
        if span.version.isdecimal()
    ]
    return AgentLoopOutput(
        prompt_ids=row.prompt_token_ids,
        response_ids=row.response_ids[:kept],
        response_mask=row.loss_mask[:kept],
        response_logprobs=row.logprobs[:kept] or None,
        routed_experts=None if row.expert_indices is None else row.expert_indices[:length],
        multi_modal_data={"images": [encoded_image(span.item).image for span in spans]} if spans else {},
        reward_score=0.0 if row.error is not None else total_reward(trajectory),
        num_turns=2 * len(trajectory),
        metrics=AgentLoopMetrics(),
        extra_fields={
            "stop_reason": row.stop_reason,
            "error": row.error,
            "turn_scores": [],
            "tool_rewards": [],
            "global_steps": versions[-1] if versions else None,
            "min_global_steps": min(versions, default=None),
            "max_global_steps": max(versions, default=None),
        },
    )

"""A program over the public names, as users write it. It is never run: `mypy --strict` reads it.

`assert_type` fails where a public signature loses its type, and an ignored error that no longer occurs is an
error itself, so misspelled arguments stay errors.
"""

from collections.abc import AsyncIterator
from typing import Any, assert_type

import mmcodecs
from mmrender import (
    MediaPolicy,
    MMRenderError,
    MultiModalData,
    ParsedResponse,
    PlaceholderRange,
    RenderedTokens,
    Renderer,
    RendererClient,
    RendererPool,
    RendererProtocol,
    TrainingSample,
    Trajectory,
    generate,
)
from mmrender.client import Generation, RendererBackend, VLLMBackend
from mmrender.messages import MessageDict
from mmrender.rollout import Turn
from mmrender.tokens.rendered import TokenSpan
from mmrender.training import ModelFamily, TrainingBatch, collate
from mmrender.trajectory import Step, load_trajectories, save_trajectories

MESSAGES: list[MessageDict] = [
    {"role": "user", "content": [{"type": "image", "image": "cow.png"}, {"type": "text", "text": "?"}]}
]


def rendering(renderer: Renderer) -> RenderedTokens:
    rendered = renderer.render(MESSAGES, add_generation_prompt=True)
    assert_type(rendered, RenderedTokens)
    assert_type(rendered.token_ids, list[int])
    assert_type(rendered.spans[0], TokenSpan)
    assert_type(rendered.multi_modal_data, MultiModalData)
    assert_type(rendered.multi_modal_data.mm_placeholders["image"][0], PlaceholderRange)
    assert_type(renderer.render_ids(MESSAGES), list[int])
    renderer.render(MESSAGES, tools=3)  # type: ignore[arg-type]
    return rendered


def bridging(renderer: Renderer, prompt: RenderedTokens, completion: list[int]) -> None:
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids,
        completion,
        [{"role": "tool", "content": "3"}],
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    assert_type(bridged, RenderedTokens | None)
    assert_type(renderer.parse_response(completion), ParsedResponse)
    assert_type(renderer.get_stop_token_ids(), list[int])


def opening() -> RendererProtocol:
    renderer = Renderer.from_pretrained("Qwen/Qwen3-VL-4B-Instruct", media_policy=MediaPolicy())
    assert_type(renderer, Renderer)
    Renderer.from_pretrained("Qwen/Qwen3-VL-4B-Instruct", media_polcy=MediaPolicy())  # type: ignore[call-arg]
    # Renderers and pools satisfy the protocol that trainers write against.
    both: list[RendererProtocol] = [renderer, RendererPool(renderer)]
    return both[0]


async def sampling(renderer: Renderer, url: str) -> None:
    backend: RendererBackend = VLLMBackend()
    generation = await generate(
        client=url, renderer=renderer, messages=MESSAGES, model="m", backend=backend, sampling_params={"n": 1}
    )
    assert_type(generation, Generation)
    trajectory = Trajectory()
    client = RendererClient(renderer, url, model="m", backend="vllm")
    assert_type(await client.create_completion(MESSAGES, trajectory=trajectory), Turn)
    await client.create_completion(MESSAGES, trajectry=trajectory)  # type: ignore[call-arg]


def recording(prompt: RenderedTokens, completion: list[int]) -> list[TrainingSample]:
    trajectory = Trajectory("task-17")
    step = trajectory.append(
        prompt.token_ids, completion, logprobs=[-0.5], multi_modal_data=prompt.multi_modal_data, reward=1.0
    )
    assert_type(step, Step)
    save_trajectories("run.mmr", [trajectory])
    assert_type(load_trajectories("run.mmr"), list[Trajectory])
    assert_type(Trajectory.from_frames(trajectory.to_frames()), Trajectory)
    assert_type(trajectory.samples(), list[TrainingSample])
    return trajectory.samples()


def training(samples: list[TrainingSample], family: ModelFamily) -> None:
    batch = collate(samples, family, pad_token_id=0)
    assert_type(batch, TrainingBatch)
    assert_type(mmcodecs.decode(mmcodecs.encode(batch), type=TrainingBatch), Any)


def shipping(value: dict[str, object], pool: mmcodecs.BufferPool) -> None:
    assert_type(mmcodecs.encode(value, buffer=pool), memoryview)
    assert_type(mmcodecs.encode_frames(value), list[bytearray | memoryview])
    encoder, decoder = mmcodecs.Encoder(), mmcodecs.Decoder(framework="torch")
    assert_type(encoder.encode(value), memoryview)
    assert_type(decoder.decode(encoder.encode_frames(value)), Any)
    with mmcodecs.RecordWriter("run.mmc") as file:
        assert_type(file.append(value), int)
    mmcodecs.Decoder(framework="jax")  # type: ignore[arg-type]
    try:
        mmcodecs.decode(b"", limits=mmcodecs.Limits(max_bytes=1))
    except mmcodecs.LimitError as error:
        assert_type(error.where, str | None)


async def failures(trajectories: AsyncIterator[Trajectory]) -> list[str]:
    try:
        return [trajectory.trajectory_id async for trajectory in trajectories]
    except MMRenderError as error:
        return [f"{error.where}: {error.remedy}"]

import asyncio
import contextvars
import copy
import pickle
import shutil
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kit import assistant, error_of, raised_by, shown, until, user
from mmrender import Renderer
from mmrender.errors import InputError, PoolClosedError, PoolFullError
from mmrender.protocols import AsyncRenderer, MultimodalRenderer, RendererProtocol, is_multimodal
from mmrender.renderer import RendererPool
from mmrender.tokens.rendered import RenderedTokens
from mmrender.view.doctor import diagnose

PHOTO = Image.linear_gradient("L").convert("RGB").resize((160, 96))
MESSAGES = [
    {"role": "user", "content": [shown(PHOTO), "What is this?"]},
    assistant("A gradient."),
    user("And now?"),
]


class Gated(Renderer):
    """Renders once its gate is open, and counts."""

    def render(self, messages: Any, **options: Any) -> RenderedTokens:
        gate: threading.Event = self.gate
        self.entered.append(threading.current_thread().name)
        assert gate.wait(timeout=60)
        return super().render(messages, **options)


class Meeting:
    """Has a processor go on only when so many threads are at it, and notes their names."""

    def __init__(self, processor: Any, count: int) -> None:
        self.threads: list[str] = []
        self._barrier = threading.Barrier(count)
        self._prepare, processor.prepare = processor.prepare, self.prepare

    def prepare(self, *given: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self._barrier.wait(timeout=60)
        return self._prepare(*given, **options)


@pytest.fixture
def gated(tiny_model: Path) -> Any:
    made: Any = Gated.from_pretrained(tiny_model, image_backend="pil")
    made.gate = threading.Event()
    made.entered = []
    return made


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, timeout=60))


def test_a_pool_is_a_renderer_that_takes_images(renderer):
    with RendererPool(renderer) as pool:
        for protocol in (RendererProtocol, MultimodalRenderer, AsyncRenderer):
            assert isinstance(pool, protocol)
        assert is_multimodal(pool)
        rendered = pool.render(MESSAGES)
        assert rendered == renderer.render(MESSAGES)
        assert len(rendered.multi_modal_data.mm_items["image"]) == 1
        assert pool.render_ids(MESSAGES) == rendered.token_ids
        assert pool.render_text(MESSAGES) == renderer.render_text(MESSAGES)
        assert pool.decode(rendered.token_ids) == renderer.decode(rendered.token_ids)
        assert pool.get_stop_token_ids() == renderer.get_stop_token_ids()
        assert (pool.profile, pool.tokenizer) == (renderer.profile, renderer.tokenizer)


def test_a_pool_of_a_text_model_is_none_that_takes_images(tiny_model, tmp_path):
    text_only = shutil.copytree(tiny_model, tmp_path / "text", ignore=shutil.ignore_patterns("*processor*"))
    with RendererPool(Renderer.from_pretrained(text_only)) as pool:
        assert pool.media is None
        assert not is_multimodal(pool)
        assert pool.render(MESSAGES[1:]).token_ids


def test_work_leaves_the_event_loop(gated):
    async def main(pool: Renderer) -> None:
        task = asyncio.create_task(pool.arender(MESSAGES))
        await until(lambda: gated.entered)  # the loop turns while the call stands at the gate
        gated.gate.set()
        await task

    with RendererPool(gated) as pool:
        run(main(pool))
    assert gated.entered[0].startswith("mmrender-pool")


def test_bridging_carries_images_and_tells_the_task_why_not(renderer):
    prompt = renderer.render(MESSAGES, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode("Still a gradient."), *renderer.get_stop_token_ids()[-1:]]
    more = [{"role": "user", "content": [shown(PHOTO.rotate(90))]}]
    images = {"previous_multi_modal_data": prompt.multi_modal_data}

    async def main(pool: Renderer) -> RenderedTokens | None:
        assert await pool.abridge_to_next_turn(prompt.token_ids, completion, [], **images) is None
        assert pool.why_not_bridged == "the extension is empty"
        bridged = await pool.abridge_to_next_turn(prompt.token_ids, completion, more, **images)
        assert pool.why_not_bridged is None
        return bridged

    with RendererPool(renderer) as pool:
        bridged = run(main(pool))
        assert bridged == pool.bridge_to_next_turn(prompt.token_ids, completion, more, **images)
        assert pool.why_not_bridged is None
        assert pool.bridge_to_next_turn(prompt.token_ids, completion, []) is None
        assert pool.why_not_bridged == "the extension is empty"
    assert len(bridged.multi_modal_data.mm_items["image"]) == 2
    assert bridged.token_ids[: len(prompt) + len(completion)] == [*prompt.token_ids, *completion]


def test_why_not_is_told_to_each_task_and_each_renderer_alone(renderer):
    async def main(pool: Renderer, other: Renderer) -> None:
        asked = asyncio.Event()

        async def ask() -> None:
            await pool.abridge_to_next_turn([1], [2], [])
            assert pool.why_not_bridged is not None
            asked.set()

        await asyncio.gather(ask(), asked.wait())
        assert pool.why_not_bridged is None
        await pool.abridge_to_next_turn([1], [2], [])
        assert other.why_not_bridged is None

    with RendererPool(renderer) as pool, RendererPool(renderer) as other:
        run(main(pool, other))
    for _ in range(20):
        other = copy.copy(renderer)  # likely to lie where the last one lay
        assert other.why_not_bridged is None
        assert other.bridge_to_next_turn([1], [2], []) is None
        assert other.why_not_bridged == "the extension is empty"
        del other


def test_parsing_and_errors_are_the_renderers(renderer):
    ids = renderer.tokenizer.encode("<think>\nWell\n</think>\n\nA gradient.<|im_end|>")
    with RendererPool(renderer) as pool:
        parsed = run(pool.aparse_response(ids))
        assert parsed == pool.parse_response(ids) == renderer.parse_response(ids)
        with pytest.raises(InputError, match=r"^messages\[0\]"):
            run(pool.arender([{"role": "user", "content": [shown(b"broken")]}]))
    assert parsed.content == "A gradient."


def test_a_worker_sees_the_callers_context(tiny_model):
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen: list[str] = []

    class Noting(Renderer):
        def render(self, messages: Any, **options: Any) -> RenderedTokens:
            seen.append(request.get())
            return super().render(messages, **options)

    async def main() -> None:
        request.set("number 7")
        async with RendererPool(Noting.from_pretrained(tiny_model, image_backend="pil")) as pool:
            await pool.arender(MESSAGES)
        with pytest.raises(PoolClosedError):
            await pool.arender(MESSAGES)

    run(main())
    assert seen == ["number 7"]


def test_images_of_one_conversation_are_processed_side_by_side(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    content = [shown(PHOTO.rotate(angle)) for angle in (0, 90, 180, 270)]
    expected = renderer.render([{"role": "user", "content": content}])
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    meeting = Meeting(renderer.media.processor, 4)
    with RendererPool(renderer, workers=1, media_threads=3) as pool:
        assert run(pool.arender([{"role": "user", "content": content}])) == expected
    assert len(meeting.threads) == 4


def test_a_pool_has_all_that_its_renderer_has_and_leaves_it_as_it_was(renderer):
    before = renderer.media
    with RendererPool(renderer, media_threads=2) as pool:
        pool.render(MESSAGES)
        assert pool.media.cache is before.cache
    assert renderer.media is before
    assert renderer.render(MESSAGES).token_ids
    with RendererPool(renderer) as pool:
        assert isinstance(pool, type(renderer))
        assert str(diagnose(pool)) == str(diagnose(renderer))
        assert pool.encode_text("Hi") == renderer.encode_text("Hi")
        assert pool.response_parser() is renderer.response_parser()
        assert (pool.templates, pool.rules) == (renderer.templates, renderer.rules)


def test_a_full_pool_refuses_who_does_not_wait_and_lets_others_in_later(gated, sentence):
    async def main(pool: Renderer) -> list[RenderedTokens]:
        first = [asyncio.create_task(pool.arender(MESSAGES)) for _ in range(3)]
        await until(lambda: len(gated.entered) == 1)
        assert str(await raised_by(PoolFullError, pool.arender(MESSAGES, nowait=True))) == sentence
        for call in (partial(pool.abridge_to_next_turn, [1], [2], []), partial(pool.aparse_response, [1])):
            with pytest.raises(PoolFullError):
                await call(nowait=True)
        gated.gate.set()
        return await asyncio.gather(*first, pool.arender(MESSAGES))

    with RendererPool(gated, workers=1, queue_size=1) as pool:
        assert len(run(main(pool))) == 4
        run(pool.arender(MESSAGES, nowait=True))
    assert len(gated.entered) == 5


def test_calls_that_are_cancelled_leave_their_places(gated):
    async def main(pool: Renderer) -> None:
        running, queued, outside = [asyncio.create_task(pool.arender(MESSAGES)) for _ in range(3)]
        await until(lambda: len(gated.entered) == 1)
        for task in (outside, queued, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(0.01)
        late = asyncio.create_task(pool.arender(MESSAGES, nowait=True))  # in the place of the queued one
        await asyncio.sleep(0.01)
        gated.gate.set()
        assert await late == gated.render(MESSAGES)
        await asyncio.gather(*[pool.arender(MESSAGES) for _ in range(8)])

    with RendererPool(gated, workers=1, queue_size=1) as pool:
        run(main(pool))
    # The cancelled call that had begun ran to its end; the other two never began.
    assert len(gated.entered) == 1 + 1 + 1 + 8


def test_a_closed_pool_finishes_what_it_took_in_and_refuses_the_rest(gated, sentence):
    async def main(pool: Renderer) -> None:
        tasks = [asyncio.create_task(pool.arender(MESSAGES)) for _ in range(3)]
        await until(lambda: len(gated.entered) == 1)
        closing = asyncio.create_task(pool.aclose())
        await until(lambda: pool._workers._threads._is_closed)
        gated.gate.set()
        running, queued, outside = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        assert isinstance(running, RenderedTokens)
        assert isinstance(queued, RenderedTokens)
        assert isinstance(outside, PoolClosedError)
        assert str(outside) == sentence
        with pytest.raises(PoolClosedError):
            await pool.arender(MESSAGES)

    pool = RendererPool(gated, workers=1, queue_size=1)
    run(main(pool))
    pool.close()
    assert pool.render(MESSAGES) == gated.render(MESSAGES)  # on the caller's thread, which needs no other


@pytest.mark.parametrize(
    ("name", "size"), [("workers", 0), ("queue_size", -1), ("media_threads", True), ("workers", 2.0)]
)
def test_sizes(renderer, name, size, sentence):
    assert error_of(InputError, RendererPool, renderer, **{name: size}) == sentence


def test_a_pool_that_is_pickled_has_its_workers_where_it_arrives(renderer):
    with RendererPool(renderer, workers=3, queue_size=5) as pool:
        other = pickle.loads(pickle.dumps(pool))
    with other:
        assert (other._workers.count, other._workers.queue_size) == (3, 5)
        assert run(other.arender(MESSAGES)) == renderer.render(MESSAGES)


def test_a_renderer_is_async_itself(tiny_model):
    async def main(renderer: Renderer) -> None:
        prompt = await renderer.arender(MESSAGES, add_generation_prompt=True)
        assert prompt == renderer.render(MESSAGES, add_generation_prompt=True)
        assert await renderer.abridge_to_next_turn(prompt.token_ids, [2], []) is None
        assert renderer.why_not_bridged == "the extension is empty"

    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    assert renderer._workers._threads._executor is None  # threads open at the first call
    with renderer:
        run(main(renderer))
    with Renderer.from_pretrained(tiny_model, image_backend="pil", workers=2, queue_size=0) as other:
        run(main(other))
        assert other._workers.media is not None


def test_bridges_that_the_renderer_made_first_use_the_threads_of_the_pool(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    assert renderer.media is not None
    prompt = renderer.render(MESSAGES[2:], add_generation_prompt=True)
    turn = prompt.token_ids, [*renderer.tokenizer.encode("Yes."), *renderer.get_stop_token_ids()[-1:]]
    assert renderer.bridge_to_next_turn(*turn, [user("Hi")]) is not None
    meeting = Meeting(renderer.media.processor, 2)
    content = [shown(PHOTO.rotate(angle)) for angle in (0, 90)]
    with RendererPool(renderer, media_threads=1) as pool:
        assert pool.bridge_to_next_turn(*turn, [{"role": "user", "content": content}]) is not None
    assert any(name.startswith("mmrender-media") for name in meeting.threads)


def test_a_call_that_meets_the_end_is_carried_out_or_refused_by_name(renderer, monkeypatch):
    """`close` comes between the look at the pool and the call's being handed to a thread."""
    submit = ThreadPoolExecutor.submit
    closing: list[threading.Thread] = []

    def close_first(self: ThreadPoolExecutor, *given: Any, **options: Any) -> Any:
        closing.append(threading.Thread(target=pool.close))
        closing[0].start()
        closing[0].join(timeout=1)
        return submit(self, *given, **options)

    pool = RendererPool(renderer, workers=1)
    run(pool.arender(MESSAGES))
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", close_first)
        with suppress(PoolClosedError):
            assert run(pool.arender(MESSAGES)) == renderer.render(MESSAGES)
    closing[0].join()

"""Laws of the bridge, over real model directories, the demonstration's model and small templates of many kinds."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bridge_cases import (
    REAL,
    Extension,
    assert_same_rendering,
    assert_tail_equals,
    bridged,
    extensions,
    sampled_ids,
)
from kit import sources
from mmrender.errors import MMRenderError
from mmrender.media.load import LoadedImage
from mmrender.media.processor import Prepared
from mmrender.renderer import Renderer
from mmrender.sidecar import MultiModalData
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.tokens.rendered import RenderedTokens
from small_models import MODELS, SmallModel, SmallProcessor

REFUSED = {"last_user": "the template's text for this extension depends on the system prompt"}
"""Small templates with extensions that cannot be bridged, and why."""
PICTURES = sample_images(random.Random(5), 3, largest=96)
Conversation = tuple[list[dict[str, Any]], dict[str, Any]]


class Subject(NamedTuple):
    """A renderer, whether its template takes tools, and why it may refuse a bridge."""

    renderer: Renderer
    tools: bool = True
    refusal: str | None = None

    def accepts(self, bridge: RenderedTokens | None) -> bool:
        """Whether there is a bridge; the example fails where there should be one."""
        why = self.renderer.why_not_bridged
        assert bridge is not None or (why is not None and why == self.refusal), why
        return bridge is not None


@pytest.fixture(scope="module", params=["tiny", *REAL, *sorted(MODELS)])
def subject(request: pytest.FixtureRequest, renderers: Any) -> Subject:
    name = request.param
    if name in MODELS:
        return Subject(renderers(name), not MODELS[name].spec.alternating, REFUSED.get(name))
    return Subject(renderers(name))


def conversation(
    subject: Subject, source: random.Random, turns: int = 3, *, with_stops: bool = False
) -> Conversation:
    """Messages that the template takes, with no images in the assistant's turns, and options.

    A stop token inside an answer ends what the model sampled, so texts hold none unless they are asked for.
    """
    renderer = subject.renderer
    stops = set() if with_stops else {renderer.tokenizer.token(i) for i in renderer.get_stop_token_ids()}
    literals = sorted(set(renderer.tokenizer.added_ids) - _media_tokens(renderer) - stops)[:6]
    images = PICTURES if renderer.media is not None else []
    maker = ConversationMaker(renderer.profile, images, literals, turns, subject.tools)
    messages, options = maker.make(source)
    del options["add_generation_prompt"]
    for message in messages:
        if message["role"] == "assistant" and isinstance(message["content"], list):
            message["content"] = [part for part in message["content"] if part["type"] != "image"]
    return messages, options


def _media_tokens(renderer: Renderer) -> frozenset[str]:
    return renderer.media.processor.placeholder_tokens if renderer.media is not None else frozenset()


def rendered_or_reject(render: Callable[[], Any]) -> Any:
    """What `render` gives; the example is dropped where the template refuses its messages."""
    try:
        return render()
    except MMRenderError:
        assume(False)


@settings(max_examples=2)
@given(source=sources())
def test_bridges_of_canonical_turns_and_their_chain_equal_the_rendering(
    subject: Subject, source: random.Random
) -> None:
    """Each turn by itself, and from the first prompt to the last by bridges alone, each over the one before."""
    renderer = subject.renderer
    messages, options = conversation(subject, source, turns=4)
    cases = rendered_or_reject(lambda: list(extensions(renderer, messages, options)))
    current = cases[0].prompt if cases else None
    is_stable = renderer.template_profile(**_arguments(options)).prefix_stable
    for case in cases:
        alone = _extended(subject, messages, options, case, case.prompt)
        if alone is not None and is_stable and not case.full.rewritten:
            assert_same_rendering(alone, case.full)
        if current is not None:
            current = (
                alone if current is case.prompt else _extended(subject, messages, options, case, current)
            )
    adjacent = all(first.stop == second.turn for first, second in pairwise(cases))
    if current is not None and is_stable and not cases[-1].full.rewritten and adjacent:
        assert_same_rendering(current, cases[-1].full)


def _extended(
    subject: Subject,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    case: Extension,
    base: RenderedTokens,
) -> RenderedTokens | None:
    """The bridge over one extension, if there may be one. Its tail equals the rendering."""
    bridge = bridged(subject.renderer, messages, options, case, base)
    if not subject.accepts(bridge):
        return None
    assert bridge is not None
    length = len(base) + len(case.completion)
    assert bridge.token_ids[:length] == base.token_ids + case.completion
    assert_tail_equals(bridge, case.full, length, case.turn + 1)
    return bridge


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "tools"}


@settings(max_examples=3)
@given(data=st.data(), dtype=st.sampled_from([None, np.int32, np.int64, np.uint32]))
def test_whatever_was_sampled_stays(subject: Subject, data: st.DataObject, dtype: Any) -> None:
    """Any token ids at all; the caller's lists, arrays and sidecar stay as they were."""
    renderer = subject.renderer
    ids = st.integers(0, renderer.tokenizer.vocab_size - 1)
    tokens = st.lists(ids | st.sampled_from(sorted(renderer.tokenizer.added_ids.values())), max_size=12)
    first = renderer.render(
        [{"role": "user", "content": _picture_and_text(renderer)}], add_generation_prompt=True
    )
    sampled = [
        *data.draw(tokens),
        *data.draw(st.sampled_from([[], *[[i] for i in renderer.get_stop_token_ids()]])),
    ]
    prompt, completion = (
        (ids if dtype is None else np.array(ids, dtype)) for ids in (list(first.token_ids), list(sampled))
    )
    sidecar = first.multi_modal_data
    before = {key: list(value) for key, value in sidecar.mm_hashes.items()}
    role = data.draw(st.sampled_from([role for role in ("user", "tool") if role in renderer.profile.roles]))
    text = data.draw(st.text(max_size=20))
    message = {"role": role, "content": f"x{text}"}
    bridge = renderer.bridge_to_next_turn(prompt, completion, [message], previous_multi_modal_data=sidecar)
    if not subject.accepts(bridge):
        return
    assert bridge is not None
    base = len(first) + len(sampled)
    assert bridge.token_ids[:base] == first.token_ids + sampled
    assert all(type(token) is int for token in bridge.token_ids)
    assert list(prompt) == first.token_ids
    assert list(completion) == sampled
    assert {key: list(value) for key, value in sidecar.mm_hashes.items()} == before
    assert bridge.multi_modal_data.mm_placeholders == sidecar.mm_placeholders
    answer = [*renderer.tokenizer.encode("Yes."), renderer.get_stop_token_ids()[-1]]
    closed = renderer.bridge_to_next_turn(first.token_ids, answer, [message])
    assert closed is not None
    # However the turn ended: once it is closed, the same follows.
    length = min(len(bridge) - base, len(closed) - len(first) - len(answer))
    assert bridge.token_ids[-length:] == closed.token_ids[-length:]


def _picture_and_text(renderer: Renderer) -> Any:
    if "user" not in renderer.profile.image_roles:
        return "Look."
    return [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "Look."}]


@settings(max_examples=4)
@given(source=sources())
def test_sampled_is_full_minus_prompt(subject: Subject, source: random.Random) -> None:
    renderer = subject.renderer
    messages, options = conversation(subject, source, with_stops=True)
    full = rendered_or_reject(lambda: renderer.render(messages, **options))
    stops = set(renderer.get_stop_token_ids())
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index in {*full.rewritten, *full.answer_only}:
            continue
        prompt = renderer.render(messages[:index], **options, add_generation_prompt=True)
        sampled = sampled_ids(full, index)
        start = next((span.start for span in full.spans if span.sampled and span.message == index), None)
        if start is None:
            # An empty turn that nothing ends.
            assert full.token_ids == prompt.token_ids
            continue
        assert full.token_ids[start : start + len(sampled)] == sampled
        assert stops.isdisjoint(sampled[:-1])
        if full.token_ids[: len(prompt)] == prompt.token_ids:
            assert start == len(prompt)
        else:
            assert not renderer.template_profile(**_arguments(options)).prefix_stable


class CountingProcessor(SmallProcessor):
    """Writes more tokens for an image that others accompany."""

    depends_on_image_count = True

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        made = SmallProcessor(self.token, self.expand).process(loaded)
        identity = f"{made.identity} {min(num_images, 2)}"
        item = replace(made, identity=identity, expansion=self.expand(min(num_images, 2)))
        return Prepared(identity, lambda: item)


@pytest.mark.parametrize("earlier", [0, 1, 2, 3])
@pytest.mark.parametrize("added", [0, 1, 2])
def test_images_that_depend_on_their_number_follow_any_prompt_but_that_of_one(
    earlier: int, added: int
) -> None:
    model = SmallModel("everything", MODELS["everything"].spec)
    model.__dict__["processor"] = CountingProcessor(model.spec.placeholder, model.spec.expansion)
    renderer = model.renderer()

    def asked(images: int) -> list[dict[str, Any]]:
        pictures = [{"type": "image", "image": PICTURES[0]}] * images
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": "Look."}]}]

    prompt = renderer.render(asked(earlier), add_generation_prompt=True)
    messages = [*asked(earlier), {"role": "assistant", "content": "Yes."}, *asked(added)]
    full = renderer.render(messages, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode("Yes."), renderer.get_stop_token_ids()[0]]
    sidecar = prompt.multi_modal_data
    bridge = renderer.bridge_to_next_turn(
        prompt.token_ids, completion, asked(added), previous_multi_modal_data=sidecar
    )
    if earlier == 1 and added:
        assert bridge is None
        assert (
            renderer.why_not_bridged == "the processor treats an image differently when more of them follow"
        )
    else:
        assert bridge is not None, renderer.why_not_bridged
        assert_same_rendering(bridge, full)


def test_empty_extension_and_assistant_in_it_are_refused(subject: Subject) -> None:
    renderer = subject.renderer
    assistant = "the extension holds an assistant message, whose tokens were not sampled"
    for extension, why in (
        ([], "the extension is empty"),
        ([{"role": "assistant", "content": "x"}], assistant),
    ):
        given = ([1], renderer.get_stop_token_ids()[-1:], extension)
        assert renderer.bridge_to_next_turn(*given, previous_multi_modal_data=MultiModalData()) is None
        assert renderer.why_not_bridged == why

"""What is refused before it is sent."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from client_prompts import (
    CLOSE,
    IMAGE,
    OPEN,
    PAD,
    TOKENS,
    VIDEO_PAD,
    VOCAB,
    FakeItem,
    PromptMaker,
    qwen_item,
    tiled_item,
)
from client_prompts import video_item as a_video
from kit import error_of
from mmrender.client.exchange import check_request
from mmrender.client.types import EngineRequest
from mmrender.client.vllm_images import dense_spans
from mmrender.errors import EngineUnsupportedError, InputError, PlaceholderError
from mmrender.sidecar import MediaSpan, MultiModalData, PlaceholderRange, Repeat, Text, collapse


def check_sidecar(
    ids: Any, data: MultiModalData, token_ids: Mapping[str, int] | None = None, **takes: Any
) -> list[MediaSpan]:
    request = EngineRequest("m", ids, {}, "r", data, media_token_ids=token_ids or {})
    return check_request(request, **{"takes": ("image", "video"), **takes})[1]


def prompt() -> PromptMaker:
    return PromptMaker().text([1, 2]).framed(qwen_item(4)).text([3]).framed(qwen_item(6)).text([4, 5])


def with_ranges(sidecar: MultiModalData, *ranges: PlaceholderRange) -> MultiModalData:
    return MultiModalData(sidecar.mm_hashes, {"image": list(ranges)}, sidecar.mm_items)


# --- token ids ---


def checked(ids: Any, vocab_size: int | None) -> list[int]:
    return check_request(EngineRequest("m", ids, {}, "r", vocab_size=vocab_size))[0].tolist()


def test_a_prompt_becomes_an_array() -> None:
    assert checked([0, 99], VOCAB) == [0, 99]
    assert checked(np.array([3], np.int32), None) == [3]


@pytest.mark.parametrize(
    ("ids", "vocab"),
    [([1, 100], 100), ([1, -1], 100), ([-7], None), ([], 100), ([[1], [2]], 100)],
    ids=["too large", "negative", "negative without vocabulary", "empty", "nested"],
)
def test_ids_that_kill_an_engine_are_refused(ids: Any, vocab: int | None, sentence: Any) -> None:
    assert error_of(InputError, checked, ids, vocab) == sentence


# --- ranges ---


def test_a_sidecar_that_fits_is_returned_in_prompt_order() -> None:
    made = PromptMaker().framed(a_video(3), VIDEO_PAD).framed(qwen_item(4)).framed(qwen_item(4)).text([1])
    placed = check_sidecar(np.array(made.ids), made.sidecar)
    assert [(entry.modality, entry.start, entry.stop) for entry in placed] == [
        ("video", 1, 4),
        ("image", 6, 10),
        ("image", 12, 16),
    ]
    assert check_sidecar(np.array([1, 2]), MultiModalData()) == []


def test_images_may_stand_side_by_side_and_a_sampled_pad_token_stays() -> None:
    made = PromptMaker().text([1]).item(qwen_item(4)).item(qwen_item(6)).text([2])
    assert len(check_sidecar(np.array(made.ids), made.sidecar)) == 2
    made = prompt().text([7, PAD, PAD, 8, PAD])
    assert len(check_sidecar(np.array(made.ids), made.sidecar)) == 2


def test_tiled_images_are_taken_where_the_engine_keeps_their_masks(sentence: Any) -> None:
    made = PromptMaker().framed(tiled_item(2, 3)).text([1])
    spans = check_sidecar(np.array(made.ids), made.sidecar)
    assert len(spans) == 1
    with pytest.raises(EngineUnsupportedError) as caught:
        dense_spans(spans)
    assert str(caught.value) == sentence


Change = Callable[[MultiModalData], MultiModalData]
R0, R1 = PlaceholderRange(3, 4), PlaceholderRange(9 + 1, 6)
REFUSED: dict[str, Change] = {
    "offset one early": lambda s: with_ranges(s, PlaceholderRange(2, 4), R1),
    "swapped": lambda s: with_ranges(s, R1, R0),
    "runs out of order": lambda s: with_ranges(s, PlaceholderRange(3, 4, ((2, 4), (0, 2))), R1),
    "an image lost": lambda s: MultiModalData(
        {"image": s.mm_hashes["image"][:1]}, {"image": [R0]}, {"image": s.mm_items["image"][:1]}
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_sidecars_that_do_not_fit_are_refused(case: str, sentence: Any) -> None:
    made = prompt()
    check_sidecar(np.array(made.ids), made.sidecar)
    problem = error_of(PlaceholderError, check_sidecar, np.array(made.ids), REFUSED[case](made.sidecar))
    assert problem == sentence


def test_tokens_of_an_expansion_are_held_against_the_prompt(sentence: Any) -> None:
    made = PromptMaker().text([1]).item(qwen_item(4)).text([PAD, 2])
    assert error_of(PlaceholderError, check_sidecar, np.array(made.ids), made.sidecar) == sentence
    made = PromptMaker().framed(qwen_item(2)).framed(FakeItem((Repeat("video", 2),), "other"))
    with pytest.raises(PlaceholderError, match="does not hold the tokens of its item"):
        check_sidecar(np.array(made.ids), made.sidecar)
    made = PromptMaker().text([1]).item(qwen_item(1)).text([2])
    moved = MultiModalData.of([(PlaceholderRange(2, 1), made.placed[0][1])])
    check_sidecar(np.array(made.ids), made.sidecar, token_ids=TOKENS)
    assert error_of(PlaceholderError, check_sidecar, np.array(made.ids), moved, token_ids=TOKENS) == sentence
    tiled = PromptMaker().item(tiled_item(1, 1)).text([1])
    short = PlaceholderRange(0, 5, ((1, 2), (3, 5)))
    with pytest.raises(PlaceholderError) as caught:
        check_sidecar(np.array(tiled.ids), MultiModalData.of([(short, tiled.placed[0][1])]), token_ids=TOKENS)
    assert "expected the token 94, 6 tokens in all, got the end at 5, 5 in all" in str(caught.value)


# --- collapsing ---


def test_ranges_collapse_to_what_the_template_wrote() -> None:
    made = prompt()
    assert collapse(made.ids, made.sidecar) == [1, 2, OPEN, PAD, CLOSE, 3, OPEN, PAD, CLOSE, 4, 5]
    tiled = PromptMaker().text([1]).item(tiled_item(2, 2), IMAGE).item(tiled_item(1, 1), IMAGE).text([2])
    assert collapse(tiled.ids, tiled.sidecar, {"image": IMAGE}) == [1, IMAGE, IMAGE, 2]


def test_what_cannot_be_put_back_is_refused(sentence: Any) -> None:
    tiled = PromptMaker().item(tiled_item(1, 1))
    assert error_of(PlaceholderError, collapse, tiled.ids, tiled.sidecar) == sentence
    # Text at an edge was encoded together with the text beside it, so its tokens lie outside of the range.
    edged = FakeItem((Repeat("pad", 2), Text("\n")), "edged")
    sidecar = MultiModalData.of([(PlaceholderRange(0, 2), edged)])
    with pytest.raises(PlaceholderError):
        collapse([PAD, PAD, 5], sidecar, {"image": IMAGE})

"""A sample of one small image and no loss, for ranks that have no image in a step in which others have.

Sharded training gathers the weights of the vision tower on every rank or on none, so a rank without images
hangs the others. A dummy takes the whole way through the model, and its weight in the loss is zero.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mmrender.errors import BatchError
from mmrender.media.load import LoadedImage
from mmrender.media.processors.base import MediaProcessor
from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange, Repeat
from mmrender.trajectory.engine_data import RoutedExperts
from mmrender.trajectory.sample import TrainingSample

DUMMY_ID = "dummy"


def dummy_sample(
    item: MediaItem,
    token_ids: Sequence[int],
    *,
    embed_spans: tuple[tuple[int, int], ...] | None = None,
    like: TrainingSample | None = None,
) -> TrainingSample:
    """Return a sample that is one image and has no loss.

    Args:
        item: The image.
        token_ids: What stands for it in a prompt, all of its placeholder.
        embed_spans: Which of these tokens stand for features; None for all.
        like: A sample of the batch; the dummy has advantages, rewards and router choices where it has.
    """
    count = len(token_ids)
    zeros = np.zeros(count, np.float32)
    experts = None
    if like is not None and like.routed_experts is not None:
        _, layers, top_k = like.routed_experts.shape
        choices = np.arange(top_k, dtype=like.routed_experts.dtype)
        experts = RoutedExperts(np.broadcast_to(choices, (count, layers, top_k)))
    return TrainingSample(
        token_ids=np.asarray(token_ids, np.int32),
        loss_mask=np.zeros(count, np.bool_),
        logprobs=zeros,
        multi_modal_data=MultiModalData.of([(PlaceholderRange(0, count, embed_spans), item)]),
        rewards=None if like is None or like.rewards is None else zeros,
        advantages=None if like is None or like.advantages is None else zeros,
        routed_experts=experts,
        sample_id=DUMMY_ID,
    )


def smallest_dummy(samples: Sequence[TrainingSample]) -> TrainingSample | None:
    """Return a dummy of the smallest image in the samples, with the tokens that stand for it there.

    Needs neither processor nor tokenizer. None where no sample has an image: then no rank needs a dummy.
    """
    found = [
        (placeholder.length, item.nbytes, number, index, modality)
        for number, sample in enumerate(samples)
        for modality, items in sample.multi_modal_data.mm_items.items()
        for index, (item, placeholder) in enumerate(
            zip(items, sample.multi_modal_data.mm_placeholders[modality], strict=True)
        )
    ]
    if not found:
        return None
    _, _, number, index, modality = min(found)
    sample = samples[number]
    placeholder = sample.multi_modal_data.mm_placeholders[modality][index]
    return dummy_sample(
        sample.multi_modal_data.mm_items[modality][index],
        sample.token_ids[placeholder.offset : placeholder.offset + placeholder.length].tolist(),
        embed_spans=placeholder.embed_spans,
        like=sample,
    )


def blank_dummy(
    processor: MediaProcessor,
    encode: Callable[[str], Sequence[int]],
    *,
    side: int = 32,
    like: TrainingSample | None = None,
) -> TrainingSample:
    """Return a dummy of a black square, for a process that holds no image of the data.

    Args:
        processor: The model's.
        encode: Text to ids, special tokens included, none added.
        side: Of the square in pixels, before resizing.
        like: As for `dummy_sample`.

    Raises:
        MediaError: The processor refuses an image of this size.
        BatchError: A token of the placeholder is not one id.
    """
    item = processor.process(LoadedImage(array=np.zeros((side, side, 3), np.uint8)))
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for piece in item.expansion:
        if not isinstance(piece, Repeat):
            ids += encode(piece.text)
            continue
        token = list(encode(piece.token))
        if len(token) != 1:
            where, got = repr(piece.token), str(token)
            raise BatchError("a token of the placeholder is not one id", where=where, got=got)
        if piece.embeds:
            spans.append((len(ids), len(ids) + piece.count))
        ids += token * piece.count
    return dummy_sample(item, ids, embed_spans=tuple(spans), like=like)

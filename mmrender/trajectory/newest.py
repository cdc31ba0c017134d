"""`Newest`: the sequence of a trajectory's newest step, which the next call mostly extends."""

from operator import is_
from typing import Any

import numpy as np

from mmrender.errors import PlaceholderError
from mmrender.sidecar import MediaSpan, MultiModalData
from mmrender.trajectory.engine_data import last_run
from mmrender.trajectory.prefix import Place
from mmrender.trajectory.step import Int32Array, Step, check_ids


class Newest:
    """The tokens, media and messages of the newest step, in buffers that grow.

    Attributes:
        step: The step.
        messages: Its whole conversation.
        experts_run: The last gapless run of positions whose router choices are known.
        prompt: The tokens as a list that shares its numbers with prompts that come as lists.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.messages: list[Any] = []
        self.experts_run: tuple[int, int] | None = None
        self.prompt: list[int] = []
        self._array: Int32Array = np.zeros(0, np.int32)
        self._sidecar = MultiModalData()

    def extension(self, prompt_ids: Any, sidecar: MultiModalData, where: str) -> Place | None:
        """Return a prompt's additions to this step, or None if it does not begin with all of it."""
        length = len(self.step)
        if not len(self.step.own_ids) or not self._begins(prompt_ids, length):
            return None
        media = self._added_media(sidecar, len(prompt_ids))
        if media is None or (media and media[0].start < length):
            return None
        added = check_ids(prompt_ids[length:], f"{where}.prompt_ids", start=length)
        return Place(self.step, length, added, media)

    def extend(self, step: Step, completion_ids: Any) -> None:
        """Take in a step that extends this one, and its sampled tokens as the caller passed them."""
        start, stop = len(self.step), len(step)
        if len(self._array) < stop or not self._array.flags.writeable:
            self._array = np.concatenate([self._array[:start], np.empty(max(1024, stop), np.int32)])
        self._array[start:stop] = step.own_ids
        if self.prompt:
            given = isinstance(completion_ids, list)
            self.prompt += completion_ids if given else step.completion_ids.tolist()
        if step.own_experts is not None:
            runs = [] if self.experts_run is None else [self.experts_run]
            self.experts_run = last_run([*runs, (step.own_experts.start, step.own_experts.stop)])
        del self.messages[step.messages_keep :]
        self.messages.extend(step.new_messages)
        if step.own_media:
            added = MultiModalData.of((span.range, span.item) for span in step.own_media)
            self._sidecar = self._sidecar.merged(added)
        self.step._sequence = self.step._sidecar = None
        self.step = step
        step._sequence, step._sidecar = self._array[:stop], self._sidecar
        step._sequence.flags.writeable = False

    def _begins(self, prompt_ids: Any, length: int) -> Any:
        """Whether a prompt begins with the tokens of this step."""
        step, own, is_list = self.step, self.step.own_ids, isinstance(prompt_ids, list | tuple)
        if is_list and list(prompt_ids[length - len(own) : length]) != own.tolist():
            return False
        if not is_list and not (isinstance(prompt_ids, np.ndarray) and prompt_ids.dtype.kind in "iu"):
            return False
        if not len(self._array):  # no prompt has come so far
            self._array, self._sidecar = step.token_ids, step.multi_modal_data
            self.messages, self.experts_run = step.messages, step.experts_run(length)
        if not is_list:
            self.prompt = []
            return prompt_ids.ndim == 1 and np.array_equal(prompt_ids[:length], self._array[:length])
        prompt_ids = list(prompt_ids) if isinstance(prompt_ids, tuple) else prompt_ids
        # The list shares its numbers with earlier prompts, so it compares by address, and without a slice
        # that would touch each number.
        is_new = not self.prompt
        known = self._array[:length].tolist() if is_new else self.prompt
        del known[length:]
        known += prompt_ids[length:]
        is_same = known == prompt_ids
        if is_new and is_same:
            self.prompt = prompt_ids.copy()
        return is_same

    def _added_media(self, sidecar: MultiModalData, length: int) -> list[MediaSpan] | None:
        """Return the media after this step's, or None if these differ or the others do not fit."""
        columns = (sidecar.mm_hashes, sidecar.mm_placeholders, sidecar.mm_items)
        counts: dict[str, int] = {}
        for modality, known in self._sidecar.mm_items.items():
            count = counts[modality] = len(known)
            hashes, ranges, items = ([*column.get(modality, ())[:count]] for column in columns)
            expected = self._sidecar.mm_hashes[modality], self._sidecar.mm_placeholders[modality], count
            if (hashes, ranges, len(items)) != expected:
                return None
            if not all(map(is_, items, known)) and [item.identity for item in items] != hashes:
                return None
        added: list[Any] = [
            {modality: entries[counts.get(modality, 0) :] for modality, entries in column.items()}
            for column in columns
        ]
        try:
            spans = MultiModalData(*added).spans(length)
        except PlaceholderError:
            return None  # then the whole sidecar is checked, whose error names the right place
        return [span._replace(position=span.position + counts.get(span.modality, 0)) for span in spans]

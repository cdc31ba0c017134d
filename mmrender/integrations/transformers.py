"""mmrender behind the call of a Transformers processor: texts or messages in, a `BatchFeature` out.

```python
from mmrender.integrations.transformers import Processor

processor = Processor.from_pretrained("MODEL")
messages = [{"role": "user", "content": "Which animal says moo?"}]
inputs = processor(messages=messages, add_generation_prompt=True)  # for model.generate(**inputs)
```

The outputs equal the family's own processor. In messages, content of users is not syntax. Texts are syntax
throughout, as for a processor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Self

import numpy as np
from transformers import BatchFeature

from mmrender.errors import InputError
from mmrender.messages import Message, Modality
from mmrender.model.files import find_model
from mmrender.renderer import Renderer
from mmrender.sidecar import mm_token_type_ids
from mmrender.tokens.rendered import RenderedTokens
from mmrender.training.families import ModelFamily
from mmrender.training.kwargs import collate_mm_kwargs
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample

_OF_TOKENS = ("return_dict", "return_tensors", "padding")
"""Options without effect on text, as for a processor."""


@dataclass(frozen=True)
class Processor:
    """Renders conversations and texts to a model's keyword arguments. Safe to use from many threads.

    Attributes:
        renderer: Renders them.
        family: How the tensors of several images become one.
        pad_token_id: Padding token.
        padding_side: Side of the padding, `"left"` to generate.
        response_template: The model's own grammar of completions, or None.
    """

    renderer: Renderer
    family: ModelFamily
    pad_token_id: int
    padding_side: Literal["left", "right"] = "left"
    response_template: Mapping[str, Any] | None = None

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, revision: str | None = None, **options: Any) -> Self:
        """Load the processor of a model, with further options of `Renderer.from_pretrained`."""
        renderer = Renderer.from_pretrained(name_or_path, revision=revision, **options)
        model = find_model(name_or_path, revision=revision)
        pad = renderer.templates.special_tokens.get("pad_token")
        pad_token_id = renderer.tokenizer.token_id(pad) if pad else None
        return cls(
            renderer,
            ModelFamily.from_config(model.config),
            renderer.get_stop_token_ids()[0] if pad_token_id is None else pad_token_id,
            response_template=model.tokenizer_config.get("response_template"),
        )

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        *,
        videos: Any = None,
        messages: Sequence[Any] | None = None,
        dtype: Any = None,
        padding: bool | str = True,
        return_tensors: str = "pt",
        **options: Any,
    ) -> BatchFeature:
        """Return the model's keyword arguments as torch tensors, one row for each text or conversation.

        Args:
            images: Sources for the placeholders of `text`, in order: a list for one text, a list of lists or
                one whole list for several. For messages, sources of parts without one.
            text: Rendered texts.
            videos: As `images`, for videos.
            messages: A conversation, or a list of them, in place of `text`.
            dtype: Torch dtype of pixels, by default float32.
            padding: As for a processor. Rows are padded to the longest. Only a single row may be unpadded.
            return_tensors: `"pt"`.
            **options: For messages, options of `Renderer.render`.

        Raises:
            InputError: Both texts and messages are passed, or neither, or texts with options. Another padding
                or framework is requested. The number of lists of sources differs from the rows.
            MMRenderError: As for `Renderer.render` and `Renderer.encode_text`.
        """
        if (text is None) == (messages is None) or (text is not None and options):
            raise InputError(
                "a call takes either texts or messages",
                where=next(iter(options), "text"),
                expected="text=... with images=..., or messages=... with options of the template",
            )
        if return_tensors != "pt":
            raise InputError(
                "tensors are torch's", where="return_tensors", expected="'pt'", got=repr(return_tensors)
            )
        if messages is not None:
            rows = messages if _is_nested(messages) else [messages]
            image_rows, video_rows = _rows(images, len(rows)), _rows(videos, len(rows))
            if image_rows is None or video_rows is None:
                raise InputError(
                    "several conversations need a list of sources each",
                    where="images" if image_rows is None else "videos",
                    expected=f"{len(rows)} lists",
                )
            rendered = [
                self.renderer.render(row, images=row_images, videos=row_videos, **options)
                for row, row_images, row_videos in zip(rows, image_rows, video_rows, strict=True)
            ]
        else:
            texts = [text] if isinstance(text, str) else list(text or ())
            rendered = [
                self.renderer.encode_text(row, images=row_images, videos=row_videos)
                for row, row_images, row_videos in zip(
                    texts,
                    self._by_text(texts, images, "image"),
                    self._by_text(texts, videos, "video"),
                    strict=True,
                )
            ]
        if padding not in (True, "longest") and (padding is not False or len(rendered) > 1):
            raise InputError(
                "rows are padded to the longest", where="padding", expected="True", got=repr(padding)
            )
        return self._batch(rendered, dtype)

    def apply_chat_template(
        self, conversation: Sequence[Any], *, tokenize: bool = False, **options: Any
    ) -> BatchFeature | str | list[str]:
        """Render a conversation or a list of them: to text, or as a call does.

        Tokens come with `return_dict=True` and `return_tensors="pt"`, which may be passed as to a processor.
        Other options are options of `Renderer.render`.

        Raises:
            InputError: Tokens are requested in another form.
        """
        if tokenize:
            if not options.pop("return_dict", True):
                raise InputError("tokens come in a dict", where="return_dict", expected="True", got="False")
            return self(messages=conversation, **options)
        options = {name: value for name, value in options.items() if name not in _OF_TOKENS}
        if not _is_nested(conversation):
            return str(self.renderer.render_text(conversation, **options))
        return [str(self.renderer.render_text(row, **options)) for row in conversation]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        return self.renderer.decode([int(token) for token in token_ids])

    def parse_response(
        self, token_ids: Sequence[int], *, prompt_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Parse a completion by the model's `response_template`, with Transformers' own parser.

        Args:
            token_ids: Sampled tokens.
            prompt_ids: The prompt, which may contain the beginning of the turn.
            tools: Tool definitions, whose schemas type the arguments.

        Raises:
            InputError: The model has no response template.
        """
        from transformers.utils.chat_parsing import parse_response

        if self.response_template is None:
            raise InputError(
                "the model has no response template",
                where="tokenizer_config.json",
                expected="a member response_template",
                remedy="Use renderer.parse_response, which proves a grammar by the chat template",
            )
        prefix = self.decode(prompt_ids)
        message: dict[str, Any] = parse_response(
            self.decode(token_ids), dict(self.response_template), prefix=prefix, tools=tools
        )
        return message

    def _by_text(self, texts: Sequence[str], sources: Any, modality: Modality) -> list[Any]:
        """Return the sources of each text. From one whole list, each text takes one for each placeholder."""
        nested = _rows(sources, len(texts))
        if sources is None or nested is not None:
            return nested or [None] * len(texts)
        rest = iter(sources)
        media = self.renderer.media
        token = media.processor.placeholder.get(modality) if media is not None else None
        counts = [sum(match.token == token for match in self.renderer.tokenizer.find(text)) for text in texts]
        parts = [list(islice(rest, count)) for count in counts]
        parts[-1] += rest
        return parts

    def _batch(self, rendered: Sequence[RenderedTokens], dtype: Any) -> BatchFeature:
        width = max(map(len, rendered))
        shape = (len(rendered), width)
        fields = {
            "input_ids": np.full(shape, self.pad_token_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "mm_token_type_ids": np.zeros(shape, np.int64),
        }
        samples = []
        for row, tokens in enumerate(rendered):
            start = width - len(tokens) if self.padding_side == "left" else 0
            used = (row, slice(start, start + len(tokens)))
            fields["input_ids"][used] = tokens.token_ids
            fields["attention_mask"][used] = 1
            spans = tokens.multi_modal_data.spans(len(tokens))
            fields["mm_token_type_ids"][used] = mm_token_type_ids(spans, len(tokens))
            mask = np.zeros(len(tokens), np.bool_)
            samples.append(TrainingSample(tokens.token_array, mask, multi_modal_data=tokens.multi_modal_data))
        types = fields.pop("mm_token_type_ids")
        if self.family.token_types is not None:
            fields[self.family.token_types] = types
        tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
        images = collate_mm_kwargs(samples, self.family, dtype=dtype or torch.float32)
        return BatchFeature({**tensors, **images})


def _is_nested(conversations: Sequence[Any]) -> bool:
    """Whether these are several conversations, not the messages of one."""
    return bool(conversations) and not isinstance(conversations[0], Mapping | Message)


def _rows(sources: Any, rows: int) -> list[Any] | None:
    """Return a list of sources for each row, or None if one list has the sources of several rows."""
    if sources is None:
        return [None] * rows
    lists = list(sources) if isinstance(sources, list | tuple) else [sources]
    if lists and all(isinstance(each, list | tuple) for each in lists):
        if len(lists) == rows:
            return lists
        raise InputError("sources do not fit the rows", expected=f"{rows} lists", got=f"{len(lists)} lists")
    return [lists] if rows == 1 else None

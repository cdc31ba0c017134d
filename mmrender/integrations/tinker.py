"""Prompts and training samples as Tinker's `ModelInput` and `Datum`.

```python
import tinker
from mmrender import Renderer, build_training_sample
from mmrender.integrations.tinker import to_datum, to_model_input

renderer = Renderer.from_pretrained("MODEL")
question = {"role": "user", "content": "Moo?"}
rendered = renderer.render([question], add_generation_prompt=True)
prompt = to_model_input(rendered.token_ids, rendered.multi_modal_data)  # of SamplingClient.sample
sample = build_training_sample(renderer, [question, {"role": "assistant", "content": "A cow."}])
datum = to_datum(sample)  # of TrainingClient.forward_backward
```
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker

from mmrender.errors import InputError
from mmrender.media.encoded import encoded_image
from mmrender.sidecar import MultiModalData
from mmrender.trajectory.sample import TrainingSample


def to_model_input(token_ids: Sequence[int], multi_modal_data: MultiModalData | None = None) -> Any:
    """Return tokens as text chunks, with an image chunk in place of each image's tokens.

    Tinker processes images itself. Each is sent as `mmrender.media.encoded.encoded_image` returns it, with
    its number of tokens. Tinker refuses a request if it counts another number.

    Raises:
        MediaError: An item cannot be sent as an encoded image, such as a video.
        PlaceholderError: The sidecar does not fit the tokens.
    """
    chunks: list[Any] = []
    data = multi_modal_data or MultiModalData()
    done = 0
    for span in data.spans(len(token_ids)):
        if done < span.start:
            chunks.append(_text(token_ids[done : span.start]))
        image = encoded_image(span.item)
        kind = image.mime.removeprefix("image/")
        length = span.stop - span.start
        chunks.append(tinker.types.ImageChunk(data=image.data, format=kind, expected_tokens=length))
        done = span.stop
    if done < len(token_ids):
        chunks.append(_text(token_ids[done:]))
    return tinker.ModelInput(chunks=chunks)


def to_datum(sample: TrainingSample) -> Any:
    """Return a sample with shifted targets: the next token of each token of the input.

    With `advantages` it has the inputs of Tinker's policy losses (`importance_sampling`, `ppo`): `logprobs`
    and `advantages`, which are 0 outside the loss mask. Otherwise it has the `weights` of `cross_entropy`.

    Raises:
        InputError: It ends in an image, which predicts nothing, or has advantages without log-probabilities.
        MediaError: As for `to_model_input`.
    """
    ids, mask = sample.token_ids, sample.loss_mask
    spans = sample.media_spans
    if len(ids) < 2 or (spans and spans[-1].stop == len(ids)):
        raise InputError(
            "the sample must end in text to predict",
            where=sample.sample_id or "sample",
            expected="two tokens or more, of which the last is text",
        )
    if sample.advantages is not None and sample.logprobs is None:
        raise InputError(
            "advantages need the sampler's log-probabilities", where=sample.sample_id or "sample", got="none"
        )
    targets = ids.astype(np.int64)
    for span in spans:
        targets[span.start : span.stop] = 0
    if sample.advantages is not None and sample.logprobs is not None:
        values = {"logprobs": sample.logprobs * mask, "advantages": sample.advantages * mask}
    else:
        weights = mask if sample.loss_weights is None else sample.loss_weights
        values = {"weights": weights.astype(np.float32)}
    inputs = {name: tinker.TensorData.from_numpy(value[1:]) for name, value in values.items()}
    return tinker.Datum(
        model_input=to_model_input(ids[:-1].tolist(), sample.multi_modal_data),
        loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(targets[1:]), **inputs},
    )


def _text(token_ids: Sequence[int]) -> Any:
    return tinker.EncodedTextChunk(tokens=list(token_ids))

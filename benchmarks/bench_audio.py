"""Ten minutes of speech: time to the model's inputs, and bytes kept, against the reference.

    python benchmarks/bench_audio.py MODEL_DIR [--seconds 600] [--rounds 5] [--clock wall|cpu] [--json FILE]

MODEL_DIR is a model that takes audio. "reference" decodes a 16-bit WAV file by Transformers' `load_audio` and
runs the model's processor. "new" is `Renderer.render` of a clip that was never seen, "features" the same with
the item's tensors, and "again" `Renderer.render` of a clip that was seen. The bytes are those of the
reference's tensors and of the items of clips in each format. The tensors of both sides are compared first;
torch uses one thread.
"""

import argparse
import base64
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import numpy as np  # noqa: E402
import soundfile  # noqa: E402
import torch  # noqa: E402
from measure import Contender, machine, medians, shown_ms  # noqa: E402
from transformers.audio_utils import load_audio  # noqa: E402

from mmrender import Renderer  # noqa: E402
from mmrender.testing.reference import ReferenceRenderer  # noqa: E402

RATE = 16_000


def speech(seconds: int) -> np.ndarray[Any, Any]:
    """Noise of falling power in syllables and pauses, which codecs pack about as speech."""
    rng = np.random.default_rng(0)
    count = seconds * RATE
    spectrum = np.fft.rfft(rng.normal(size=count))
    frequency = np.fft.rfftfreq(count, 1 / RATE)
    voiced = np.fft.irfft(spectrum / (1 + (frequency / 500) ** 2), count)
    syllables = np.repeat(rng.random(4 * seconds) ** 3, RATE // 4)
    samples = voiced * syllables[:count]
    return (samples / np.abs(samples).max() * 0.8).astype(np.float32)


def encoded(samples: np.ndarray[Any, Any], **form: str) -> bytes:
    """Return the file of a clip."""
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, **form)
    return out.getvalue()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    samples = speech(given.seconds)
    wav = encoded(samples, format="WAV", subtype="PCM_16")
    url = f"data:audio/wav;base64,{base64.b64encode(wav).decode()}"
    renderer = Renderer.from_pretrained(given.directory, image_backend="pil", memo_bytes=0)
    reference = ReferenceRenderer(given.directory, "pil").processor
    messages = [{"role": "user", "content": [{"type": "audio", "audio": wav}]}]
    text = renderer.render_text(messages)

    def theirs() -> Any:
        clip = load_audio(url, RATE, backend="soundfile")
        return reference(text=[text], audio=[clip], sampling_rate=RATE, return_tensors="pt")

    def forget() -> None:
        assert renderer.media is not None
        assert renderer.media.processor.audio is not None
        renderer.media.cache.clear()
        vars(renderer.media.processor.audio)["_features"].clear()

    def item_of(source: bytes) -> Any:
        message = {"role": "user", "content": [{"type": "audio", "audio": source}]}
        (span,) = renderer.render([message]).multi_modal_data.spans()
        return span.item

    tensors, output = item_of(wav).tensors(framework="torch"), theirs()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, output[name]), name
    contenders = {
        "reference": Contender(theirs),
        "new": Contender(lambda: renderer.render(messages), forget),
        "features": Contender(lambda: item_of(wav).tensors(), forget),
        "again": Contender(lambda: renderer.render(messages)),
    }
    seconds = medians(contenders, rounds=given.rounds, clock=given.clock)
    kept = {"reference": sum(output[name].nbytes for name in tensors)}
    for name, form in {
        "WAV": {"format": "WAV", "subtype": "PCM_16"},
        "MP3": {"format": "MP3"},
        "Opus": {"format": "OGG", "subtype": "OPUS"},
    }.items():
        kept[name] = item_of(encoded(samples, **form)).nbytes
    print(machine(("numpy", "torch", "transformers", "soundfile")))
    for name, value in seconds.items():
        print(f"{name:>10}  {shown_ms(value)} ms  {value / seconds['reference']:.2f}")
    for name, count in kept.items():
        print(f"{name:>10}  {count:,} bytes  {count / kept['reference']:.2f}")
    if given.json:
        given.json.write_text(json.dumps({"seconds": seconds, "bytes": kept}))


if __name__ == "__main__":
    main()

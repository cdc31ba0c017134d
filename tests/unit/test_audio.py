"""Audio from any source to samples of one channel, and files that lie."""

import base64
import importlib.util
import io
import struct

import numpy as np
import pytest

from audio_cases import clip, heard, wav
from kit import error_of
from mmrender.errors import MediaBlockedError, MediaDecodeError, MediaError, MediaLimitError
from mmrender.media.audio import load_audio
from mmrender.media.policy import MediaPolicy
from mmrender.media.resolve import part_fingerprint
from mmrender.messages import AudioPart
from mmrender.processes import BoundedProcesses

needs_decoder = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("soundfile", "soxr")),
    reason="needs soundfile and soxr, of the extra audio",
)
SHORT = MediaPolicy(max_audio_seconds=2)


def encoded(kind: str, samples, rate: int, **options) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.atleast_2d(samples).T, rate, format=kind, **options)
    return out.getvalue()


def test_samples_at_the_models_rate_stay_as_they_are():
    samples = clip(0.1)
    loaded = load_audio(samples, 16_000, source_rate=16_000)
    assert np.array_equal(loaded.samples, samples)
    assert (loaded.rate, loaded.samples.dtype, loaded.samples.flags.writeable) == (16_000, np.float32, False)
    assert loaded.seconds == 0.1
    assert not np.shares_memory(loaded.samples, samples)


@pytest.mark.parametrize("channels", [2, 8])
@pytest.mark.parametrize("turned", [False, True])
def test_channels_are_averaged_whichever_way_they_lie(channels, turned):
    samples = clip(0.1, channels=channels)
    loaded = load_audio(samples.T if turned else samples, 16_000, source_rate=16_000)
    assert np.array_equal(loaded.samples, samples.mean(axis=0))


@pytest.mark.parametrize(("dtype", "scale"), [(np.int16, 2**15), (np.int32, 2**31)])
def test_levels_become_floats(dtype, scale):
    levels = np.array([-scale, 0, 1, scale - 1], dtype)
    loaded = load_audio(levels, 16_000, source_rate=16_000)
    assert np.array_equal(loaded.samples, (levels / scale).astype(np.float32))


def test_a_tensor_is_an_array():
    torch = pytest.importorskip("torch")
    samples = clip(0.1)
    loaded = load_audio(torch.from_numpy(samples), 16_000, source_rate=16_000)
    assert np.array_equal(loaded.samples, samples)


REFUSED = {
    "no rate": (clip(0.1), None),
    "a rate of encoded audio": (wav(clip(0.1)), 16_000),
    "levels of 8 bits": (np.zeros(100, np.uint8), 16_000),
    "which axis has channels": (np.zeros((9, 100), np.float32), 16_000),
    "no samples": (np.zeros(0, np.float32), 16_000),
    "three dimensions": (np.zeros((1, 2, 100), np.float32), 16_000),
    "not a number": (np.array([0, np.nan], np.float32), 16_000),
    "too large for float32": (np.array([0, 1e300]), 16_000),
    "a rate beyond all devices": (clip(0.1), 10**9),
    "too long": (clip(2.1), 16_000),
    "an object": (object(), None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays(case, sentence):
    source, rate = REFUSED[case]
    kind = MediaLimitError if case == "too long" else MediaDecodeError
    assert error_of(kind, load_audio, source, 16_000, SHORT, source_rate=rate, where="audio[0]") == sentence


def test_a_path_in_a_string_is_blocked(tmp_path):
    file = tmp_path / "a.wav"
    file.write_bytes(wav(clip(0.1)))
    assert "forbids the local file" in error_of(MediaBlockedError, load_audio, str(file), 16_000)


@needs_decoder
class TestEncoded:
    def test_every_source_of_a_file_gives_the_same_samples(self, tmp_path):
        data = wav(clip(0.2, channels=2), 22_050)
        file = tmp_path / "a.wav"
        file.write_bytes(data)
        text = base64.b64encode(data).decode()
        sources = [data, file, io.BytesIO(data), text, f"data:audio/wav;base64,{text}"]
        loaded = [load_audio(source, 16_000).samples for source in sources]
        assert all(np.array_equal(each, loaded[0]) for each in loaded)

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("WAV", {"subtype": "PCM_24"}),
            ("WAV", {"subtype": "FLOAT"}),
            ("WAV", {"subtype": "ULAW"}),
            ("WAVEX", {}),
            ("FLAC", {}),
            ("OGG", {"subtype": "VORBIS"}),
            ("MP3", {}),
        ],
    )
    @pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
    def test_samples_are_the_references(self, kind, options, rate):
        from transformers.audio_utils import load_audio as reference

        samples = clip(1.3, rate=rate, channels=2)
        data = encoded(kind, samples, rate, **options)
        expected = reference(f"data:audio/x;base64,{base64.b64encode(data).decode()}", backend="soundfile")
        assert np.array_equal(load_audio(data, 16_000).samples, expected)

    @pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
    def test_a_truncated_file_is_one_error(self, kind):
        data = encoded(kind, clip(3.0, rate=44_100, channels=2), 44_100)
        for part in (0.3, 0.9, 0.99):
            error = error_of(MediaDecodeError, load_audio, data[: int(part * len(data))], 16_000)
            assert "damaged or truncated" in error

    def test_a_file_of_a_pipe_states_no_size(self):
        data = bytearray(wav(clip(0.2)))
        data[40:44] = b"\xff" * 4
        assert np.array_equal(
            load_audio(bytes(data), 16_000).samples, load_audio(wav(clip(0.2)), 16_000).samples
        )

    @pytest.mark.parametrize(
        "case", ["size", "bytes a sample", "bytes a second", "rate", "channels", "no data"]
    )
    def test_a_header_that_lies_is_one_error(self, case, sentence):
        data = bytearray(wav(clip(0.2)))
        if case == "size":
            struct.pack_into("<I", data, 40, 1 << 30)
        elif case == "bytes a sample":
            struct.pack_into("<H", data, 32, 4)
        elif case == "bytes a second":
            struct.pack_into("<I", data, 28, 7)
        elif case == "rate":
            struct.pack_into("<II", data, 24, 1, 2)
        elif case == "channels":
            struct.pack_into("<HIIH", data, 22, 500, 16_000, 16_000_000, 1000)
        else:
            data = data[:36]
        assert error_of(MediaError, load_audio, bytes(data), 16_000, where="audio[0]") == sentence

    def test_a_forged_duration_is_one_error(self):
        data = bytearray(encoded("FLAC", clip(0.5), 16_000))
        # The number of samples: 36 bits that end 26 bytes into the file.
        data[22:26] = (16_000 * 60).to_bytes(4)
        error = error_of(MediaDecodeError, load_audio, bytes(data), 16_000)
        assert "damaged or truncated" in error

    def test_an_hour_of_silence_is_refused_at_once(self):
        import soundfile

        out = io.BytesIO()
        with soundfile.SoundFile(out, "w", 8_000, 1, format="FLAC", subtype="PCM_16") as file:
            for _ in range(60):
                file.write(np.zeros(8_000 * 60, np.float32))
        data = out.getvalue()
        assert len(data) < 100_000
        error = error_of(MediaLimitError, load_audio, data, 16_000)
        assert error == (
            "the audio is too long - expected at most 2400 seconds, got 3600.0 seconds or more. "
            "Raise MediaPolicy(max_audio_seconds=...), or pass a part of it."
        )

    @pytest.mark.parametrize(
        "limit", [{"max_audio_bytes": 10_000}, {"max_bytes": 100}, {"max_audio_seconds": 1}]
    )
    def test_limits(self, limit, sentence):
        data = encoded("FLAC", clip(1.5, channels=2), 16_000)
        policy = MediaPolicy(**limit)
        assert error_of(MediaLimitError, load_audio, data, 16_000, policy, where="audio[0]") == sentence

    @pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff\xf1" + b"x" * 100, b"....ftypM4A "])
    def test_other_data(self, data, sentence):
        assert error_of(MediaDecodeError, load_audio, data, 16_000, where="audio[0]") == sentence

    def test_in_a_child_process(self):
        data = encoded("FLAC", clip(0.2, rate=8_000), 8_000)
        with BoundedProcesses(1) as processes:
            loaded = load_audio(data, 16_000, MediaPolicy(processes=processes))
        assert np.array_equal(loaded.samples, load_audio(data, 16_000).samples)


def test_fingerprints_follow_samples_and_rate():
    samples = clip(0.1)
    prints = [
        part_fingerprint(AudioPart(source, rate))
        for source, rate in [
            (samples, 16_000),
            (samples.copy(), 16_000),
            (samples, 8_000),
            (clip(0.1, seed=1), 16_000),
        ]
    ]
    assert prints[0] == prints[1]
    assert len({*prints}) == 3
    assert part_fingerprint(AudioPart(heard(samples)["audio"].tobytes())) not in prints
    assert part_fingerprint(AudioPart("https://host/a.wav")) is None

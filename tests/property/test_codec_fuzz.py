"""A short, fixed run of the fuzzer; `python tests/codec_fuzz.py` is the long one."""

from pathlib import Path

from codec_fuzz import Fuzzer


def test_mutated_messages_raise_codec_errors_only(tmp_path: Path) -> None:
    fuzzer = Fuzzer(2026, tmp_path)
    for _ in range(4000):
        fuzzer.step()
    foreign = [failure[:2] for failure in fuzzer.report.failures if " ms for " not in failure[1]]
    assert foreign == []
    outcomes = fuzzer.report.outcomes
    for name in (*fuzzer.decoders.codec, *fuzzer.decoders.tagged, "vLLM item", "RecordReader"):
        # A decoder that refuses everything, or accepts everything, would not have been tried.
        assert sum(count for outcome, count in outcomes.items() if outcome.startswith(f"{name}: ")) > 50, name
    assert sum(count for outcome, count in outcomes.items() if outcome.endswith(": read")) > 400

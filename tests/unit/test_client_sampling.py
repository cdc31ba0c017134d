"""Sampling parameters: one spelling, checked, and translated for each engine."""

from typing import Any

import pytest

from kit import error_of, raised
from mmrender.client.sampling import (
    PARAMETERS,
    SPELLINGS,
    EngineName,
    check_sampling_params,
    complete_sampling,
    spell,
)
from mmrender.errors import SamplingParameterError


def translate(params: dict[str, Any], engine: EngineName) -> tuple[dict[str, Any], dict[str, Any]]:
    """Spell parameters, without the length that every request has."""
    sampling, request = spell({"max_tokens": 9, **params}, engine)
    if "max_tokens" not in params:
        for name in ("max_tokens", "max_new_tokens", "max_completion_tokens"):
            sampling.pop(name, None)
    return sampling, request


def known_to(engine: EngineName) -> set[str]:
    return set(SPELLINGS[engine])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAN, INF = float("nan"), float("inf")
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1], [0, 2, True]),
    "temperature": ([0, 0.0, 0.7, 2], [-0.1, 2.1, NAN, INF, "1", True]),
    "top_p": ([0.01, 1], [0, 1.1, NAN]),
    "top_k": ([-1, 0, 50], [-2, 1.0, 2**31]),
    "min_p": ([0, 1.0], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2.0], [-2.1]),
    "frequency_penalty": ([-2.0, 0], [2.1]),
    "repetition_penalty": ([0.1, 30], [0, INF]),
    "seed": ([-1, 0, 2**63 - 1], [1.0, 2**63]),
    "max_tokens": ([1, 100_000], [0, 1.5, True, 2**31]),
    "min_tokens": ([0, 5], [-1]),
    "stop": (["x", ["x", "yz"], []], ["", ["a", ""], 3, [1]]),
    "stop_token_ids": ([[], [1, 2], (3,)], [[-1], [2**31], [1.0], 3, [True]]),
    "include_stop_str_in_output": ([True, False], [1]),
    "ignore_eos": ([True], ["yes"]),
    "logprobs": ([-1, 0, 20], [-2, True]),
    "prompt_logprobs": ([0], [-2]),
    "prompt_logprob_start": ([0], [-1]),
    "prompt_logprob_token_ids": ([[[1, -1]]], [[1]]),
    "logprob_token_ids": ([[1]], [[-1]]),
    "flat_logprobs": ([True], [0]),
    "detokenize": ([True, False], [0]),
    "skip_special_tokens": ([False], [0]),
    "spaces_between_special_tokens": ([False], [0]),
    "stream_interval": ([1], [0]),
    "structured_outputs": (
        [{"json": SCHEMA}, {"regex": "a+"}, {"choice": ["a"]}, {"json_object": True}],
        [{}, {"json": SCHEMA, "regex": "a"}, "json", {"schema": SCHEMA}, {"json": {"maximum": NAN}}],
    ),
    "logit_bias": (
        [{}, {1: 0.5}, {"12": -100}],
        [{"a": 1}, {"-1": 1}, {"9" * 11: 1}, {-1: 1}, {1: "x"}, {1: NAN}, [1]],
    ),
    "allowed_token_ids": ([[1]], [[], [-1]]),
    "bad_words": ([["a"]], [[""], "a"]),
    "extra_args": ([{"a": 1}], [[1]]),
    "skip_reading_prefix_cache": ([True], [1]),
    "thinking_token_budget": ([0], [-1]),
    "repetition_detection": ([{"max_pattern_size": 4, "min_count": 3}], [3]),
    "watermarking": ([False], [1]),
    "trace_decode_token_ids": ([[1]], [["a"]]),
}
"""By name what is taken, and what is refused."""


def test_every_parameter_is_tried_and_none_is_one_that_is_not_set():
    assert set(VALUES) == set(PARAMETERS)
    assert check_sampling_params(dict.fromkeys(PARAMETERS)) == {}
    with pytest.raises(SamplingParameterError):
        check_sampling_params({"unheard_of": None})


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_values_are_taken_as_they_are_or_refused_by_name(name):
    good, bad = VALUES[name]
    for value in good:
        assert check_sampling_params({name: value}) == {name: value}
        assert translate({name: value}, "vllm") == ({name: value}, {})
    for value in bad:
        caught = raised(SamplingParameterError, check_sampling_params, {name: value})
        assert caught.where == f"sampling_params[{name!r}]"
        assert caught.expected
        assert caught.got == repr(value)


UNKNOWN = "unknown sampling parameter"
OTHER_NAME = f"{UNKNOWN}. Sampling parameters have vLLM's names for every engine; this one is"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 3},
        {"max_new_tokens": 5},
        {"guided_json": SCHEMA},
        {"priority": 1},
        {"tempreature": 1},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": ["x"], "detokenize": False},
    ],
)  # fmt: skip
def test_errors_say_what_to_write(params, sentence):
    assert error_of(SamplingParameterError, check_sampling_params, params) == sentence


@pytest.mark.parametrize("engine", ["vllm", "sglang", "dynamo"])
def test_a_name_that_the_engine_lacks_is_an_error(engine, sentence):
    lacking = sorted(set(PARAMETERS) - known_to(engine))
    assert lacking or engine == "vllm"
    errors = []
    for name in lacking:
        caught = raised(SamplingParameterError, translate, {name: VALUES[name][0][0]}, engine)
        assert caught.where == f"sampling_params[{name!r}]"
        errors.append(str(caught))
    assert errors[:1] == sentence


ONE_BY_ONE = [
    ({"max_tokens": 7}, {"max_new_tokens": 7}, {"max_completion_tokens": 7}),
    ({"min_tokens": 2}, {"min_new_tokens": 2}, {"min_tokens": 2}),
    ({"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_k": 0}, {"top_k": -1}, {"top_k": 0}),
    ({"seed": 3}, {"sampling_seed": 3}, {"seed": 3}),
    ({"stop": "x"}, {"stop": ["x"]}, {"stop": ["x"]}),
    ({"stop_token_ids": [1]}, {"stop_token_ids": [1]}, {"stop_token_ids": [1]}),
    ({"include_stop_str_in_output": True}, {"no_stop_trim": True}, {"include_stop_str_in_output": True}),
    ({"logit_bias": {5: 1.0}}, {"logit_bias": {"5": 1.0}}, {"logit_bias": {"5": 1.0}}),
]
"""Parameters, and how SGLang and Dynamo spell them."""


def test_engines_spell_differently():
    given = {name: value for params, _, _ in ONE_BY_ONE for name, value in params.items()} | {"logprobs": 2}
    sglang, dynamo = translate(given, "sglang"), translate(given, "dynamo")
    assert sglang[0] == {name: value for _, each, _ in ONE_BY_ONE for name, value in each.items()}
    assert sglang[1] == {"return_logprob": True, "top_logprobs_num": 2}
    # Dynamo takes everything at the top level.
    logprobs = {"logprobs": True, "top_logprobs": 2}
    assert dynamo[0] == logprobs | {k: v for _, _, each in ONE_BY_ONE for k, v in each.items()}
    assert dynamo[1] == {}


@pytest.mark.parametrize(
    ("asked", "sglang", "dynamo"),
    [
        ({"json": SCHEMA}, {"json_schema": '{"type":"object","properties":{"a":{"type":"integer"}}}'}, {"guided_json": SCHEMA}),
        ({"json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}, {"guided_json": '{"type": "object"}'}),
        ({"json_object": True}, {"json_schema": '{"type":"object"}'}, {"guided_json": {"type": "object"}}),
        ({"regex": "a|b", "choice": None}, {"regex": "a|b"}, {"guided_regex": "a|b"}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
    ],
    ids=["json", "json text", "json object", "regex", "grammar"],
)  # fmt: skip
def test_structures_are_spelled(asked, sglang, dynamo):
    params = {"structured_outputs": asked}
    assert translate(params, "sglang")[0] == sglang
    assert translate(params, "dynamo")[0] == dynamo


def test_structures_that_an_engine_lacks_are_errors(sentence):
    with pytest.raises(SamplingParameterError) as caught:
        translate({"structured_outputs": {"choice": ["a", "b"]}}, "sglang")
    assert str(caught.value) == sentence
    with pytest.raises(SamplingParameterError):
        translate({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "dynamo")


def test_the_callers_parameters_are_not_changed():
    params = {"stop_token_ids": [1], "temperature": 1, "extra": {"a": 1}}
    translate(params, "sglang")
    complete_sampling(params, room=3, stop_token_ids=[2])
    assert params == {"stop_token_ids": [1], "temperature": 1, "extra": {"a": 1}}

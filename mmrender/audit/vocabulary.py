"""The tokens of a vocabulary by their text, and those that a model's configuration names."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from mmrender.audit.case import Case
from mmrender.audit.report import Decode

MAX_SPECIALS: Final = 32


def name_of(case: Case, token: int) -> str:
    """Return a text such as "'<|im_end|>' (id 2)"."""
    texts = pieces(case)[1]
    return f"{texts[token]!r} (id {token})" if texts else f"the token with id {token}"


def said(case: Case, ids: Sequence[int]) -> str:
    """Return a text such as "one more token, '<|im_end|>' (id 2),"."""
    named = ", ".join(dict.fromkeys(name_of(case, token) for token in ids))
    return f"{'one more token' if len(ids) == 1 else f'{len(ids)} more tokens'}, {named},"


def configured(case: Case, *names: str) -> list[int]:
    """Return the tokens that the model's configurations name so, each once."""
    model = case.trainer.model
    configs = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    held = [getattr(config, name, None) for config in configs for name in names]
    named = [one for value in held for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in dict.fromkeys(named) if isinstance(one, int)]


def specials(case: Case) -> list[int]:
    """Return tokens that are written as special tokens are, in angle brackets, and hold no image."""

    def found() -> list[int]:
        sample, (_, texts) = case.sample, pieces(case)
        held = {int(one) for span in sample.media_spans for one in sample.token_ids[span.start : span.stop]}
        special = [token for token, text in enumerate(texts) if len(text) > 2 and text[0] + text[-1] == "<>"]
        return [token for token in special if token not in held][:MAX_SPECIALS]

    return case.once("specials", found)


def pieces(case: Case) -> tuple[Mapping[str, int], Sequence[str]]:
    """Return the tokens of the vocabulary by their text, and their texts, empty without `decode`."""
    if case.decode is None:
        return {}, ()
    return _read_vocabulary(case.decode, len(case.trainer.model.get_output_embeddings().weight))


@lru_cache(maxsize=2)
def _read_vocabulary(decode: Decode, count: int) -> tuple[Mapping[str, int], Sequence[str]]:
    texts = [decode([token]) for token in range(count)]
    return {text: token for token, text in reversed(list(enumerate(texts))) if text}, texts

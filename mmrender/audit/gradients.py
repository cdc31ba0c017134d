"""Other tokens of prompts, found by gradients.

The model is taken for linear in the embedding of each token of a prompt, so the order of candidates is
approximate. The likeliest are run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from mmrender.audit.case import Case, Trial
from mmrender.audit.prompts import heads
from mmrender.audit.report import Comparison
from mmrender.audit.vocabulary import name_of
from mmrender.trajectory.sample import TrainingSample

_MAX_GRADIENTS: Final = 24
"""Tokens whose gradients are read."""
_MAX_PAIRS: Final = 1 << 25
"""Places times tokens of a vocabulary, up to which all tokens are tried."""
_MAX_RUN: Final = 32
"""Candidates that are run."""
_MAX_REPLACED: Final = 3
_NEARER: Final = 0.8
"""Maximum share of the differences that one replaced token of several leaves."""


def _replacements(
    case: Case, sample: TrainingSample, compared: Comparison, groups: Sequence[Sequence[int]]
) -> list[tuple[Sequence[int], int]]:
    """Return groups of places with another token, in the order of how far that lowers the differences."""
    import torch

    finite = np.flatnonzero(np.isfinite(compared.difference))
    some = finite[np.unique(np.linspace(0, len(finite) - 1, _MAX_GRADIENTS).round().astype(int))]
    found = case.trainer.slopes(sample, compared.positions[some]) if len(finite) and groups else None
    if found is None:
        return []
    (slopes, vectors), embedding = found, case.trainer.model.get_input_embeddings()
    lacking = -torch.from_numpy(compared.difference[some].copy()).to(slopes)
    flat = torch.tensor([place for places in groups for place in places], device=slopes.device)
    of = torch.tensor([group for group, places in enumerate(groups) for _ in places], device=slopes.device)
    # All tokens of a small vocabulary, and the prompt's own of a large one.
    size = len(embedding.weight)
    own = np.unique(sample.token_ids[flat.cpu().numpy()])
    tokens = np.arange(size) if size * len(groups) < _MAX_PAIRS else own
    with torch.no_grad():
        both = torch.cat([slopes, (slopes * vectors).sum(-1, keepdim=True)], -1)[:, flat]
        summed = both.new_zeros(len(both), len(groups), both.shape[-1]).index_add_(1, of, both)
        others = embedding(torch.from_numpy(tokens).to(flat.device)).float()
        changes = (summed[..., :-1] @ others.T - summed[..., -1:]).flatten(1)
        along = lacking @ changes
        likeness = along / changes.norm(dim=0).clamp(min=1e-9)
        best = [int(at) for at in likeness.topk(min(_MAX_RUN, len(likeness))).indices if along[at] > 0]
    pairs = [(groups[at // len(tokens)], int(tokens[at % len(tokens)])) for at in best]
    return [(places, token) for places, token in pairs if sample.token_ids[places[0]] != token]


def other_tokens(case: Case) -> Iterator[Trial]:
    """Yield prompts in which a token, or two or three, are others.

    A token of a template is another at all its places: those behind one token.
    """
    sample, best, own = case.sample, case.compared, case.sample.token_ids
    tied: dict[tuple[int, int], list[int]] = {}
    for at in np.flatnonzero(case.free).tolist():
        tied.setdefault((int(own[at - 1]) if at else -1, int(own[at])), []).append(at)
    groups = [[at] for some in tied.values() for at in some]
    groups += [some for some in tied.values() if len(some) > 1]
    headers, changed = heads(case), dict[int, int]()
    for _ in range(_MAX_REPLACED):
        found = _replacements(case, sample, best, groups)
        options = [{**changed, **dict.fromkeys(places, token)} for places, token in found]
        # The token may be right, and its place one off.
        options += [
            {**{at: one for at, one in changed.items() if at != place}, place + by: token}
            for place, token in list(changed.items())[-1:]
            for by in (-2, -1, 1, 2)
            if 0 <= place + by < len(own) and not case.sample.loss_mask[place + by]
        ]
        samples = []
        for option in options:
            ids = own.copy()
            ids[[*option]] = [*option.values()]
            samples.append(replace(case.sample, token_ids=ids))
        compared = case.run([Trial("", one) for one in samples])
        tried = [(one.rms, number) for number, one in enumerate(compared) if one is not None]
        least, number = min(tried, default=(np.inf, 0))
        if not least < _NEARER * best.rms:
            return
        best, sample, changed = compared[number] or best, samples[number], options[number]
        in_head = all(any(first <= at < last for first, last in headers) for at in changed)
        named = {at: (name_of(case, token), name_of(case, int(own[at]))) for at, token in changed.items()}
        texts = [f"{token} at {at}, not {instead}" for at, (token, instead) in named.items()]
        where = "another token in headers of messages" if in_head else "another token"
        fitted = 2 * len({(int(own[at]), token) for at, token in changed.items()})
        statement = f"the sampler's prompt had {where}: {' and '.join(texts)}"
        yield Trial(statement, sample, since=min(changed), fitted=fitted)

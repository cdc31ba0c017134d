"""The beginning of the sampled tokens of assistant turns: sampled = full minus prompt.

The prompt of a turn is the rendering of the messages before it with the generation prompt, so the
conversation must begin with that prompt. If it does not, the template writes the turn differently as history
than it asked the model for it: the turn is rewritten, and none of its tokens count as sampled.

One kind of rewritten turn still has an answer: its generation prompt writes a reasoning block, open or empty,
and the turn has no reasoning, so the template leaves the block out or writes an empty one. The whole turn is
then its answer, and the answer counts as sampled. The tokens of the block do not: a prompt writes them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from mmrender.errors import TemplateError
from mmrender.messages import RenderRequest
from mmrender.template.profile import TemplateProfile
from mmrender.template.text import Span, TracedStr, plain

_MAX_WHOLE = 6
"""Maximum number of prompts of one conversation that are rendered whole. With more turns, prompts are read
off renderings of single rounds, and some of them are compared with whole prompts."""

Render: TypeAlias = Callable[[RenderRequest], TracedStr]


class SampledTurn(NamedTuple):
    """An assistant message, and the characters at which its sampled tokens may begin.

    Attributes:
        message: Index of the message.
        prompt_stop: End of its generation prompt. None if the text does not continue its prompt.
        answer_start: Start of its answer if it has no reasoning and its generation prompt writes a block.
    """

    message: int
    prompt_stop: int | None
    answer_start: int | None

    @property
    def cuts(self) -> list[int]:
        """The characters at which its sampled tokens may begin, the preferred one first."""
        return [cut for cut in self[1:] if cut is not None]


def sampled_turns(
    text: TracedStr, request: RenderRequest, profile: TemplateProfile, render: Render
) -> tuple[list[SampledTurn], list[int]]:
    """Find the assistant turns that a model samples, and the messages whose turns are rewritten.

    Args:
        text: The rendered conversation.
        request: The conversation. A turn that it continues is part of the prompt.
        profile: Findings about the template. Prompts are rendered if the generation prompt depends on the
            conversation, or if the template rewrites history.
        render: Renders prompts.
    """
    return _Conversation(text, request, profile, render).sampled_turns()


class _Conversation:
    """A rendered conversation and its assistant messages (`answers`)."""

    def __init__(
        self, text: TracedStr, request: RenderRequest, profile: TemplateProfile, render: Render
    ) -> None:
        self._body = plain(text)
        self._request = request
        self._messages = request.messages if request.continued is None else request.messages[:-1]
        self._profile = profile
        self._render = render
        self._spans: defaultdict[int, list[Span]] = defaultdict(list)
        for span in text.spans:
            self._spans[span[2].message].append(span)
        self._starts = {index: spans[0][0] for index, spans in self._spans.items()}
        self._answers = [index for index, message in enumerate(self._messages) if message.role == "assistant"]
        prompts, block = profile.generation_prompts, profile.reasoning
        self._is_fixed = len(prompts) == 1
        self._block = block if block and any(block.begin in prompt for prompt in prompts) else None
        self._alone = {index for index in self._answers if self._is_answer_alone(index)}

    def sampled_turns(self) -> tuple[list[SampledTurn], list[int]]:
        """The turns that a model samples, and the messages whose turns are rewritten."""
        profile, body = self._profile, self._body
        all_stable = profile.answers_stable and len(self._alone) == len(self._answers)
        turns: dict[int, SampledTurn] = {}
        unknown = []
        for index in self._answers:
            start = self._starts.get(index, len(body))
            begins = index in self._starts and body.startswith(profile.generation_prompt, start)
            if self._is_fixed and (profile.prefix_stable if begins else all_stable):
                turns[index] = self._turn_after(index, body[:start] + profile.generation_prompt)
            elif begins or index in self._alone or not self._is_fixed:
                unknown.append(index)
        turns |= self._by_rounds(unknown) or {index: self._whole(index) for index in unknown}
        sampled = [turn for _, turn in sorted(turns.items()) if turn.cuts]
        return sampled, sorted({*self._answers} - {turn.message for turn in sampled})

    def _is_answer_alone(self, index: int) -> bool:
        """Whether a turn has no reasoning, and the text has all of its content, apart from an empty block."""
        message, block, spans = self._messages[index], self._block, self._spans[index]
        if block is None or not spans or message.reasoning:
            return False
        printed = "".join(self._body[low:high] for low, high, origin in spans if origin.kind == "content")
        content = block.empty.sub("", message.text, count=1)
        return "".join(printed.split()) == "".join(content.split())

    def _turn_after(self, index: int, prompt: str) -> SampledTurn:
        """The turn, as far as the text continues a prompt."""
        body, start = self._body, self._starts.get(index, len(self._body))
        stop = answer = None
        expected = start + len(self._profile.generation_prompt)
        if body.startswith(prompt) and (not self._is_fixed or len(prompt) == expected):
            stop = len(prompt)
        if self._block is not None and index in self._alone:
            answer = self._block.answer_start(body, start, prompt)
            if answer is not None:  # blanks that begin the content belong to it
                contents = (low for low, _, origin in self._spans[index] if origin.kind == "content")
                answer = min(answer, next(contents, answer))
        return SampledTurn(index, stop, answer)

    def _whole(self, index: int) -> SampledTurn:
        """The turn after its prompt, rendered whole."""
        try:
            prompt = plain(self._render(self._request.prompt_after(self._messages[:index])))
        except TemplateError:
            return SampledTurn(index, None, None)
        return self._turn_after(index, prompt)

    def _by_rounds(self, answers: Sequence[int]) -> dict[int, SampledTurn]:
        """The turns after prompts of single rounds. Empty if few, or if a whole prompt disagrees."""
        if len(answers) <= _MAX_WHOLE:
            return {}
        turns = {index: self._turn_after(index, prompt) for index, prompt in self._round_prompts(answers)}
        if len(turns) < len(answers):
            return {}
        kinds = [[cut is None for cut in turns[index][1:]] for index in answers]
        changes = [
            index for index, (one, two) in zip(answers[1:], pairwise(kinds), strict=True) if one != two
        ]
        sample = {*answers[:: -(-len(answers) // _MAX_WHOLE)], answers[-1], *changes[:_MAX_WHOLE]}
        return turns if all(self._whole(index) == turns[index] for index in sample) else {}

    def _round_prompts(self, answers: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield the prompts of turns, read off renderings of the system prompt and one round each.

        A round goes from a user message to the last answer before the next. The text before it is taken from
        the conversation. Turns are left out if the template refuses their round, or if no round has them. If
        the generation prompt is fixed, one rendering shows all prompts of a round.
        """
        head = next((index for index, message in enumerate(self._messages) if message.role != "system"), 0)
        missing, first = {*answers}, -1
        rounds: list[tuple[int, list[int]]] = []
        for index, message in enumerate(self._messages):
            if message.role == "user" and self._messages[index - 1].role != "user":
                first = index
            if index in missing and first in self._starts:
                if not self._is_fixed or not rounds or rounds[-1][0] != first:
                    rounds.append((first, []))
                rounds[-1][1].append(index)
        for first, (*earlier, last) in rounds:
            messages = [*self._messages[:head], *self._messages[first:last]]
            try:
                text = self._render(self._request.prompt_after(messages))
            except TemplateError:
                continue
            begins: dict[int, int] = {}
            for start, _, origin in text.spans:
                begins.setdefault(origin.message - head + first, start)
            if begins.keys() >= {first, *earlier}:
                before, window = self._body[: self._starts[first]], plain(text)
                for index in earlier:
                    answer = window[begins[first] : begins[index]]
                    yield index, before + answer + self._profile.generation_prompt
                yield last, before + window[begins[first] :]

"""Laws of the gateway over agents that repeat, rewrite, drop, fork and repeat calls at random."""

import asyncio
import copy
import json

from hypothesis import given, settings

from gateway_cases import Recording, gateway, results, said
from kit import data_url, noise, sources
from mmrender.content import normalize_messages
from mmrender.gateway.call import Call
from mmrender.gateway.kinds import select_samples
from mmrender.gateway.matching import Index
from mmrender.messages import Message
from rollout_cases import TOOLS

WORDS = ("I look.", "  Two  blanks.\n", "café 🦵", "", "<|im_end|>", "1 < 2 & <b>", "\n\nSo.", "A" * 40)
ARGUMENTS = ('{"at": 1}', '{ "at":  1.0}', '{"at":3,"why":"caf\\u00e9"}', "{}", '{"why": "a\\nb", "at": 2}')
PICTURES = [data_url(noise(seed, 32, 32)) for seed in range(3)]
OTHER_TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {}}}]


def spoken(source):
    """A completion: text, calls, or both, in a spelling that the template would not write."""
    calls = [
        f'<tool_call>\n{{"name": "look", "arguments": {source.choice(ARGUMENTS)}}}\n</tool_call>'
        for _ in range(source.choice((0, 1, 1, 2)))
    ]
    text = source.choice([word for word in WORDS if "<|" not in word])
    return "\n".join([*([text] if text else []), *calls])


def repeated(source, answer):
    """The answer in the form of some harness."""
    form = source.choice(("verbatim", "parsed", "folded", "null", "text"))
    message = said(answer)
    if form == "parsed":
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(json.loads(function["arguments"]), sort_keys=True, indent=1)
    elif form == "folded":
        message["content"] = " ".join((answer.content or "").split())
    elif form == "null" and not answer.content:
        message["content"] = source.choice((None, ""))
    elif form == "text" and answer.calls:
        ids = ", ".join(f"{{'id': '{call.id}'}}" for call in answer.calls)
        message = {"role": "assistant", "content": f"{answer.content}\nCalling tools:\n[{ids}]"}
    return message


def asked(source):
    words = source.choice(WORDS) or "Go on."
    if source.random() < 0.3:
        picture = {"type": "image_url", "image_url": {"url": source.choice(PICTURES)}}
        return {"role": "user", "content": [{"type": "text", "text": words}, picture]}
    return {"role": "user", "content": words}


def edited(source, content):
    """Content with a small change: of a picture, of a blank, or of a letter's case."""
    if isinstance(content, list):
        text, picture = content
        others = [url for url in PICTURES if url != picture["image_url"]["url"]]
        return [text, {**picture, "image_url": {"url": source.choice(others)}}]
    return source.choice(("edited", f"{content} ", f" {content}", content.swapcase()))


class Agent:
    """An agent that makes calls at random, and checks each of them."""

    def __init__(self, source, renderer):
        self.source = source
        self.session = Recording(renderer, self.speak, strict=source.random() < 0.2)
        self.histories = [[{"role": "system", "content": "Be brief."}, asked(source)]]
        self.tools = TOOLS
        self.rendered = set()
        """Steps whose prompt begins with a rendering of sampled turns, since a bridge was refused."""

    def speak(self, request):
        """A completion, which the token budget cuts off now and then."""
        text = spoken(self.source)
        self.session.backend.cut = self.source.random() < 0.15
        return text[: self.source.randrange(len(text) + 1)] or "x" if self.session.backend.cut else text

    def index(self, stop=None):
        """The index of the first steps, as it is read back from their records."""
        return Index.of(self.session.trajectory.steps[:stop], strict=self.session.strict)

    async def act(self):
        """Call once, after a change of the history now and then."""
        source = self.source
        history = copy.deepcopy(source.choice(self.histories[-3:]))
        turns = [index for index, message in enumerate(history) if message["role"] == "assistant"]
        match source.choice(("go on",) * 6 + ("edit", "edit", "drop", "insert", "system", "tools")):
            case "edit" if len(history) > 2:
                index = source.randrange(1, len(history))
                if history[index]["role"] in ("user", "tool"):
                    history[index] = {**history[index], "content": edited(source, history[index]["content"])}
            case "drop" if turns:
                del history[source.choice(turns)]
            case "insert" if turns:
                index = source.choice(turns)
                foreign = {"role": "assistant", "content": source.choice(("By hand.", "Not sampled."))}
                history[index:index] = [foreign, {"role": "user", "content": "Hm."}]
            case "system":
                history[0] = {"role": "system", "content": source.choice(("Be kind.", "Be brief."))}
            case "tools":
                self.tools = source.choice((TOOLS, OTHER_TOOLS + TOOLS))
        call = Call("chat", "m", normalize_messages(history), tuple(self.tools))
        assert self.index().place(call) == self.session.index.place(call)
        step, answer = await self.session.take(call)
        self.check(call, step)
        contents = [source.choice(WORDS) or "none" for _ in answer.calls]
        history += [repeated(source, answer), *results(answer, *contents)]
        if not answer.calls or source.random() < 0.3:
            history.append(asked(source))
        self.histories.append(history)

    def check(self, call, step):
        """The prompt is the template's text with the sampled tokens of each turn in place of its words."""
        session, record = self.session, gateway(step)
        place = self.index(step.index).place(call)
        turns = dict(place.borrowed)
        while place.parent is not None:
            turns[place.start - 1] = place.parent
            shorter = Call("chat", "m", call.messages[: place.start - 1], call.tools)
            place = self.index(step.index).place(shorter)
            turns |= place.borrowed
        if record["prompt"] == "rendered" and turns:
            why = record["why_rendered"]
            assert why == "the extension is empty" or why.startswith("the template does not write messages[")
            self.rendered.add(step.index)
        if record["prompt"] != "rendered" and record.get("from") in self.rendered:
            self.rendered.add(step.index)
        if step.index in self.rendered:
            return
        messages = [
            Message(role="assistant", content=f"Turn {turns[index]}.") if index in turns else message
            for index, message in enumerate(call.messages)
        ]
        whole = session.renderer.render(messages, tools=list(step.tools), add_generation_prompt=True)
        expected, position = [], 0
        for index in sorted(turns):
            spans = [span for span in whole.spans if span.sampled and span.message == index]
            expected += whole.token_ids[position : spans[0].start]
            expected += session.trajectory.steps[turns[index]].completion_ids.tolist()
            position = spans[-1].stop
            if expected[-1] not in session.renderer.get_stop_token_ids():
                expected.append(whole.token_ids[position - 1])  # a bridge closes a turn that was cut off
        assert step.prompt_ids.tolist() == expected + whole.token_ids[position:]
        assert step.multi_modal_data.mm_hashes == whole.multi_modal_data.mm_hashes


@settings(max_examples=25)
@given(source=sources())
def test_sampled_tokens_are_never_encoded_again(renderers, source):
    agent = Agent(source, renderers("qwen3_vl"))

    async def run():
        for _ in range(source.randrange(2, 10)):
            await agent.act()

    asyncio.run(run())
    trajectory = agent.session.trajectory
    sampled = sum(len(step.completion_ids) for step in trajectory.steps)
    samples = select_samples(trajectory, ("main", "subagent", "compaction", "side"))
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == sampled
    assert len(trajectory) == len(agent.session.backend.requests)

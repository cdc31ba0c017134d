"""vLLM's sampling masks: the tokens kept under `top_p` and `top_k`, from a reply to the trainer's log-probabilities."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kit import error_of, user
from mmrender import TrainingSample, Trajectory
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import VLLMBackend, read_reply
from mmrender.client.vllm_images import GENERATE_PATH
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.errors import EngineReplyError, EngineUnsupportedError, SamplingParameterError
from mmrender.rollout.client import RendererClient
from mmrender.testing.memory_transport import Answer, MemoryTransport
from mmrender.trajectory import AllowedTokens

torch = pytest.importorskip("torch")
from mmrender.audit import TrainerModel  # noqa: E402
from mmrender.training import collate, token_entropy, token_logprobs  # noqa: E402

WHERE = "http://server/inference/v1/generate"
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def trainer(tiny_model):
    return TrainerModel.from_pretrained(tiny_model)


# --- the answer ---


def answer(ids, masks, reason="stop", **more):
    """An answer of vLLM 0.32 with `--return-sampling-mask`, by its `GenerateTokensChoice`."""
    content = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in ids]
    choice = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": ids}
    choice |= {"logprobs": {"content": content}, "routed_experts": None, "sampling_mask": masks, **more}
    return {"request_id": "generate-tokens-r", "choices": [choice], "usage": {"prompt_tokens": 2}}


def asked(**changes):
    params = {"max_tokens": 9, "top_k": 4}
    fields = {
        "model": "m",
        "prompt_ids": [1, 2],
        "sampling_params": params,
        "request_id": "r",
        "vocab_size": 50,
    }
    return EngineRequest(**(fields | changes))


def read(reply, **changes):
    return read_reply(asked(**changes), msgspec.json.encode(reply), WHERE)


def test_masks_are_what_the_tokens_were_chosen_among_beside_other_limits():
    response = read(answer([7, 8, 9], [[3, 7], [3, 7, 8], [9]]))
    assert response.allowed == ((0, 1, (3, 7), False), (1, 2, (3, 7, 8), False), (2, 3, (9,), False))
    assert response.logprobs == [-0.5] * 3  # of the kept tokens already
    same = read(answer([7, 3], [[3, 7], [3, 7]]))
    assert same.allowed == (AllowedTokens(0, 2, (3, 7)),)
    assert read(answer([7], None)).allowed == read(answer([], [], "abort")).allowed == ()
    # vLLM applies `allowed_token_ids` before it lists the kept tokens; a bias leaves media tokens in its list.
    media = read(answer([7], [[3, 7, 40]]), forbidden_token_ids=[40, 41])
    assert media.allowed == (AllowedTokens(0, 1, (3, 7)),)
    few = {"max_tokens": 9, "top_k": 4, "allowed_token_ids": [7, 8]}
    assert read(answer([7], [[3, 7]]), sampling_params=few).allowed == (AllowedTokens(0, 1, (7,)),)


@pytest.mark.parametrize(
    "masks", [[[7]], [[7], [7]], [[7], []], [[-1, 7], [8]], [[7], [8, 50]], [[7], ["8"]]], ids=str
)
def test_masks_that_do_not_fit_the_tokens(masks, sentence):
    assert error_of(EngineReplyError, read, answer([7, 8], masks)) == sentence


def test_forbidden_media_tokens_and_masks_share_one_request():
    """Their log-probabilities are asked for, and are not needed: the server's are of the kept tokens."""
    reply = answer([7, 8], [[3, 7], [8]])
    transport = MemoryTransport({f"POST {GENERATE_PATH}": Answer(reply)})
    request = asked(forbidden_token_ids=[40, 41])
    response = asyncio.run(VLLMBackend().generate(request, transport))
    assert [span.token_ids for span in response.allowed] == [(3, 7), (8,)]
    assert (response.logprobs, response.top_logprobs) == ([-0.5, -0.5], None)


def test_a_server_that_does_not_say_what_it_kept_is_warned_of_once(caplog):
    reply = answer([7, 8], None)

    def ask(url, **params):
        transport = MemoryTransport({f"POST {GENERATE_PATH}": Answer(reply)}, base_url=url)
        sampling = {"max_tokens": 9, **params}
        asyncio.run(VLLMBackend().generate(asked(sampling_params=sampling), transport))

    for params in (
        {},
        {"top_p": 1.0},
        {"top_k": 0},
        {"top_k": -1, "min_p": 0.0},
        {"top_p": 0.9, "temperature": 0},
    ):
        ask("http://maskless", **params)
    assert caplog.messages == []
    for params in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        ask("http://maskless", **params)
        ask(f"http://maskless-{next(iter(params))}", **params)
    urls = [message.partition(GENERATE_PATH)[0] for message in caplog.messages]
    assert urls == [f"http://maskless{name}" for name in ("", "-top_p", "-top_k", "-min_p")]
    assert all(
        "--return-sampling-mask --logprobs-mode processed_logprobs" in text for text in caplog.messages
    )


class TestSGLang:
    """By the members of `meta_info` that SGLang 0.5.23 writes in the mode `selected`."""

    def ask(self, masks, logprobs, **options):
        meta = {"id": "r", "finish_reason": {"type": "length", "length": 2}}
        meta["output_token_logprobs"] = [[-2.5, 7, None], [-3.5, 8, None]]
        meta |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": logprobs}
        reply = {"output_ids": [7, 8], "prompt_token_ids": [1, 2], "meta_info": meta}
        transport = MemoryTransport({"POST /generate": Answer(reply)})
        response = asyncio.run(SGLangBackend(**options).generate(asked(), transport))
        return response, transport.asked[0].json

    def test_masks_and_logprobs_of_the_kept_tokens(self):
        response, body = self.ask([[7, 3], [8]], [-0.5, 0.0], sampling_masks=True)
        assert body["return_sampling_mask"] is True
        assert response.allowed == ((0, 1, (3, 7), False), (1, 2, (8,), False))
        assert response.logprobs == [-0.5, 0.0]

    def test_a_mask_needs_a_bound(self, sentence):
        request = asked(sampling_params={"max_tokens": 9, "top_p": 0.9})
        work = SGLangBackend(sampling_masks=True).generate(request, MemoryTransport({}))
        assert error_of(SamplingParameterError, asyncio.run, work) == sentence

    def test_they_are_not_asked_for_by_themselves(self):
        response, body = self.ask(None, None)
        assert "return_sampling_mask" not in body
        assert (response.allowed, response.logprobs) == ((), [-2.5, -3.5])

    @pytest.mark.parametrize(
        ("masks", "logprobs", "kind"),
        [
            (None, None, EngineUnsupportedError),
            ([[7], [8]], [-0.5], EngineReplyError),
            ([[7]], [-0.5, 0.0], EngineReplyError),
            ([[7], [9]], [-0.5, 0.0], EngineReplyError),
        ],
    )
    def test_masks_and_logprobs_that_do_not_fit(self, masks, logprobs, kind, sentence):
        assert error_of(kind, self.ask, masks, logprobs, sampling_masks=True) == sentence


# --- streams ---


def lines(*chunks, end=b"data: [DONE]\n\n"):
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + end


def test_a_stream_with_masks_is_shown_at_its_end():
    chunks = [answer([7], [[3, 7]], None), answer([], None, None), answer([8, 9], [[8], [9, 4]], "stop")]
    transport = MemoryTransport({f"POST {GENERATE_PATH}": Answer(lines(*chunks))})
    shown = []
    work = VLLMBackend().generate(asked(), transport, on_tokens=lambda *seen: shown.append(seen))
    response = asyncio.run(work)
    assert shown == [([7, 8, 9], [-0.5] * 3, "stop")]
    assert [span.token_ids for span in response.allowed] == [(3, 7), (8,), (4, 9)]


def test_no_token_loses_its_mask_to_a_stream_that_breaks():
    broken = Answer(lines(answer([7], [[3, 7]], None), end=b""))
    aborted = Answer(lines(answer([7], [[3, 7]], "abort")))
    # The rest is asked for with a longer prompt, which the server counts.
    rest = answer([8, 9], [[8], [4, 9]], "stop") | {"usage": {"prompt_tokens": 3}}
    route = {f"POST {GENERATE_PATH}": [broken, aborted, Answer(lines(rest))]}
    engine = HTTPEngine("vllm", MemoryTransport(route), model="m", name="one")
    shown = []

    def on_tokens(ids, logprobs, reason):
        shown.extend(ids)

    response = asyncio.run(InferenceEngineClient([engine]).complete(asked(), on_tokens=on_tokens))
    assert shown == response.completion_ids == [7, 8, 9]
    assert response.allowed == ((0, 1, (3, 7), False), (1, 2, (8,), False), (2, 3, (4, 9), False))


# --- to the trainer ---


class MaskingServer:
    """vLLM with `--return-sampling-mask --logprobs-mode processed_logprobs`: its sampling chain over a model."""

    def __init__(self, model, grammar=()):
        self._model = model
        self._grammar = list(grammar)
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, request):
        body = request.json
        params, ids, masks, content = body["sampling_params"], list(body["token_ids"]), [], []
        for _ in range(params["max_tokens"]):
            with torch.inference_mode():
                logits = self._model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            if "structured_outputs" in params:
                closed = torch.full_like(logits, -torch.inf)
                closed[self._grammar] = logits[self._grammar]
                logits = closed
            logits = logits / params["temperature"]
            logits[logits < logits.topk(params["top_k"]).values[-1]] = -torch.inf
            ordered, order = logits.softmax(-1).sort(descending=True)
            logits[order[ordered.cumsum(-1) - ordered >= params["top_p"]]] = -torch.inf
            token = int(logits.softmax(-1).multinomial(1, generator=self._generator))
            masks.append(logits.isfinite().nonzero()[:, 0].tolist())
            content.append({"token_id": token, "logprob": float(logits.log_softmax(-1)[token])})
            ids.append(token)
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids[len(body["token_ids"]) :]}
        choice |= {"logprobs": {"content": content}, "sampling_mask": masks}
        return Answer({"request_id": "r", "choices": [choice]})


@pytest.mark.parametrize("structured", [False, True])
def test_the_trainers_logprobs_are_of_the_kept_tokens(renderer, trainer, structured):
    letters = [renderer.tokenizer.encode(letter)[0] for letter in "ABCDEFGHI"]
    server = MaskingServer(trainer.model, letters)
    models = Answer({"data": [{"id": "m", "max_model_len": 2048}]})
    transport = MemoryTransport({f"POST {GENERATE_PATH}": server, "GET /v1/models": models})
    params = {"max_tokens": 6, "temperature": TEMPERATURE, "top_p": 0.8, "top_k": 12, "ignore_eos": True}
    if structured:
        params["structured_outputs"] = {"regex": "[A-I]+"}
    client = RendererClient(renderer, transport, model="m", backend="vllm", sampling_params=params)
    trajectory = Trajectory("t")
    question = [user("Which way?")]
    asyncio.run(client.create_completion(question, trajectory=trajectory))
    (step,) = Trajectory.from_frames(trajectory.to_frames()).steps
    sets = [set(span.token_ids) for span in step.allowed for _ in range(span.start, span.stop)]
    assert len(sets) == 6
    assert all(len(kept) <= 12 for kept in sets)
    assert max(map(len, sets)) > 1
    assert not structured or all(kept <= set(letters) for kept in sets)
    assert "restricted" not in step.extra  # it is known what the grammar left over

    def differences(samples):
        batch = collate(samples, trainer.family, pad_token_id=0)
        with torch.inference_mode():
            logits = trainer.model(**batch.model_inputs()).logits
            found = token_logprobs(logits, batch, temperature=TEMPERATURE)
            entropy = token_entropy(logits, batch, temperature=TEMPERATURE)
        assert (entropy[batch.loss_mask] <= np.log(12) + 1e-4).all() or not samples[0].allowed
        return (found - batch.logprobs)[batch.loss_mask].abs()

    samples = trajectory.samples()
    assert float(differences(samples).max()) < 1e-4
    # Without the masks importance weights are biased.
    assert float(differences([replace(one, allowed=()) for one in samples]).mean()) > 0.1


def test_many_distinct_sets_are_looked_up_at_once(trainer):
    """A completion has a set for each token, so that work for each set would take longer than the model."""
    rng = np.random.default_rng(0)
    count = 500
    tokens = rng.integers(0, 40, count).astype(np.int32)
    spans = tuple(
        AllowedTokens(place, place + 1, tuple(sorted({int(tokens[place]), *rng.integers(0, 40, place % 7)})))
        for place in range(1, count)
    )
    zeros = np.zeros(count, np.float32)
    sample = TrainingSample(tokens, np.arange(count) > 0, zeros, allowed=spans)
    batch = collate([sample], trainer.family, pad_token_id=0)
    limits = batch.predictions().limits
    assert len(limits.only) == count - 1
    assert len(limits.token_ids) == sum(len(span.token_ids) for span in spans)

"""`InferenceEngineClient`: many engines behind the face of one."""

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any, Self

from mmrender.client.types import EngineResponse
from mmrender.engines.dispatch import Dispatcher
from mmrender.engines.fan_out import FanOut
from mmrender.engines.fleet import Fleet
from mmrender.engines.gate import Gate
from mmrender.engines.interface import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
    NamedWeightsUpdate,
    PauseMode,
    RequestPayload,
)
from mmrender.engines.members import Member
from mmrender.engines.pausing import Pauser, abort_calls, quiet
from mmrender.engines.policy import ClientPolicy
from mmrender.engines.seeds import several
from mmrender.engines.text_path import TextCompleter
from mmrender.engines.together import together
from mmrender.engines.tokens_path import TokenCompleter
from mmrender.engines.work import joined, taken_apart
from mmrender.errors import EngineError, EngineStateError
from mmrender.spans import MultiModalData


class InferenceEngineClient:
    """One engine over many: routes, retries, fails over, pauses.

    Work that an engine aborts is asked again with its tokens so far, so that callers never see a pause, and
    work on a failing engine goes to another. It may be used from several event loops and threads at once.
    Pickled, it arrives without what is under way, as a client of the same engines that runs.

    Args:
        engines: Engines with different names.
        renderer: Renders conversations and decodes completions; without one, only token ids are sampled from
            and chat requests go to the engines' own chat routes.
        policy: Routing, limits and times.
        name: Names the client among engines, as it is one itself.

    Raises:
        InputError: There is no engine, or two have one name.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        *,
        renderer: Any = None,
        policy: ClientPolicy | None = None,
        name: str = "engines",
    ) -> None:
        self.renderer = renderer
        self.policy = policy or ClientPolicy()
        self._name = name
        self._gate = Gate()
        self._fleet = Fleet(engines, self.policy, self._gate)
        for engine in engines:
            self._introduce(engine)
        self._fan_out = FanOut(self._fleet)
        self._dispatcher = Dispatcher(self._fleet, self._gate, self.policy)
        self._pauser = Pauser(self._fleet, self._gate, self.policy)
        self._tokens = TokenCompleter(self._dispatcher)
        self._text = TextCompleter(self._dispatcher)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.engines, self.renderer, self.policy, self._name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.teardown()

    # --- what it is ---

    @property
    def name(self) -> str:
        """Names it among engines."""
        return self._name

    @property
    def engines(self) -> list[InferenceEngineInterface]:
        """The engines."""
        return [member.engine for member in self._fleet.members.values()]

    @property
    def pause_modes(self) -> frozenset[PauseMode]:
        """Modes that it knows: `keep` only where every engine does."""
        able = all("keep" in engine.pause_modes for engine in self.engines)
        return frozenset({"abort", "wait", "keep"} if able else {"abort", "wait"})

    @property
    def is_paused(self) -> bool:
        """Whether no work passes at present."""
        return self._gate.state in ("pausing", "paused", "resuming")

    @property
    def members(self) -> Mapping[str, Member]:
        """The engines by name, with load and health, for those who watch."""
        return self._fleet.members

    def tp_size(self) -> int:
        """Ranks that share each layer, alike on all engines."""
        return self._common("tp_size", [engine.tp_size() for engine in self.engines])

    def pp_size(self) -> int:
        """Pipeline stages, alike on all engines."""
        return self._common("pp_size", [engine.pp_size() for engine in self.engines])

    def dp_size(self) -> int:
        """Replicas, over all engines."""
        return sum(engine.dp_size() for engine in self.engines)

    def _common(self, what: str, sizes: Sequence[int]) -> int:
        if len(set(sizes)) > 1:
            raise EngineStateError("engines differ", where=what, got=", ".join(map(str, sizes)))
        return sizes[0]

    def add_engine(self, engine: InferenceEngineInterface) -> None:
        """Add an engine that has the same weights; few sessions move to it."""
        self._fleet.add(engine)
        self._introduce(engine)

    def learn_tokens(self, renderer: Any) -> None:
        """Tell engines that have no renderer of their own what ids prompts may hold."""
        for engine in self.engines:
            _tell_tokens(engine, renderer)

    def _introduce(self, engine: InferenceEngineInterface) -> None:
        if self.renderer is not None:
            _tell_tokens(engine, self.renderer)

    async def remove_engine(self, name: str) -> InferenceEngineInterface:
        """Give an engine no more work, wait until it has done what it has, and return it.

        Under a pause it is resumed, and what it has is asked again elsewhere.
        """
        member = self._fleet.remove(name)
        await self._pauser.leave(member)
        await quiet([member])
        return member.engine

    # --- sampling ---

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample one completion for each prompt; order is kept, and every prompt survives pauses.

        Raises:
            InputError: The input is not understood.
            EngineError: A prompt could not be completed; the others are cancelled then.
        """
        work = await taken_apart(input_batch, self.renderer)
        timeout = input_batch.get("timeout")
        responses = await together([self._tokens.complete(each, timeout=timeout) for each in work])
        return joined(work, responses, None if self.renderer is None else self.renderer.decode)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: Mapping[str, Any],
        *,
        multi_modal_data: MultiModalData | None = None,
        session_id: Hashable | None = None,
    ) -> InferenceEngineOutput:
        """Sample several independent completions of one prompt.

        A `seed` is raised by one from sample to sample; with one seed they would all be the same.
        """
        return await self.generate(
            several(prompt_token_ids, num_samples, sampling_params, multi_modal_data, session_id)
        )

    async def complete(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> EngineResponse:
        """Sample one completion of one prompt; `options` are singular forms of the batch's fields.

        Args:
            prompt_ids: The prompt, placeholders widened.
            sampling_params: In vLLM's names, with `max_tokens`.
            **options: `multi_modal_data`, `collapsed_ids`, `session_id`, `cache_salt`, `priority`,
                `extra_headers`, `routed_experts`, `timeout`, `on_tokens`.
        """
        batch: dict[str, Any] = {"prompt_token_ids": [prompt_ids], "sampling_params": sampling_params}
        for name in ("multi_modal_data", "collapsed_ids"):
            if name in options:
                batch[name] = [options.pop(name)]
        if "session_id" in options:
            batch["session_ids"] = [options.pop("session_id")]
        output = await self.generate({**batch, **options})  # type: ignore[typeddict-item]
        return output["engine_responses"][0]

    async def max_prompt_len(self) -> int | None:
        """The most tokens that a prompt may have on every engine; None where none says so."""
        lengths = [await _limit_of(engine) for engine in self.engines]  # remembered, as a rule
        return min((length for length in lengths if length is not None), default=None)

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI chat request on an engine's own route, in text space."""
        return await self._text.chat(request_payload)

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI completion request, of one prompt or many, text or ids."""
        return await self._text.completion(request_payload)

    def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI chat request as chunks; an abort or failure between two is not seen."""
        return self._text.stream_chat(request_payload)

    def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI completion request as chunks."""
        return self._text.stream_completion(request_payload)

    # --- control ---

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stop all engines. When it returns, no request of this client runs, batches included.

        Raises:
            EngineStateError: It is paused already.
            EngineUnsupportedError: An engine cannot freeze requests, or cannot clear its cache. Nothing is
                paused then.
        """
        await self._pauser.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Go on with everything. An engine that does not resume is ejected, and comes back once it does.

        Raises:
            EngineStateError: It is not paused.
            EngineError: No engine resumes. The client stays paused.
        """
        await self._pauser.resume()

    async def abort_generation(self) -> None:
        """End all work, running and waiting: each piece returns what it has, with `abort`."""
        self._gate.abort()
        members = list(self._fleet.members.values())
        await asyncio.gather(*[_told(member) for member in members])
        await abort_calls(members, self.policy.pause_timeout, "aborted")

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Let all engines give up memory."""
        await self._fan_out.on_all(lambda engine: engine.sleep(level=level, tags=tags))

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Let all engines take it back."""
        await self._fan_out.on_all(lambda engine: engine.wake_up(tags=tags))

    async def reset_prefix_cache(self) -> None:
        """Let all engines forget cached prefixes."""
        await self._fan_out.on_all(lambda engine: engine.reset_prefix_cache())

    async def init_weight_update_communicator(
        self, init_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Let all engines join the trainer's group; one mapping for all, or one each in their order."""
        engines = await self._fan_out.all_present()
        infos = [init_info] * len(engines) if isinstance(init_info, Mapping) else list(init_info)
        if len(infos) != len(engines):
            raise EngineStateError(
                "there is not one for each engine",
                where="init_info",
                expected=str(len(engines)),
                got=str(len(infos)),
            )
        joining = zip(engines, infos, strict=True)
        await together([each.engine.init_weight_update_communicator(info) for each, info in joining])

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let all engines receive weights at once; all must be there, or the transfer would hang."""
        version = request.get("weight_version")
        await self._fan_out.update(lambda engine: engine.update_named_weights(request), version)

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Let all engines read weights; one that is ejected gets no work until it has read them too."""
        await self._fan_out.update(
            lambda engine: engine.load_weights(path, weight_version=weight_version),
            weight_version,
            all_present=False,
        )

    async def weight_version(self) -> str | None:
        """What the weights are called, alike on all engines.

        Raises:
            EngineStateError: Engines differ.
        """
        members = list(self._fleet.well().values())
        versions = await together([member.engine.weight_version() for member in members])
        if len(set(versions)) > 1:
            named = [f"{each.name}: {version}" for each, version in zip(members, versions, strict=True)]
            raise EngineStateError("engines have different weights", got=", ".join(named))
        return versions[0] if versions else None

    async def set_weight_version(self, version: str) -> None:
        """Name the weights on all engines."""
        await self._fan_out.on_all(lambda engine: engine.set_weight_version(version))
        self._fleet.version = version

    async def check_health(self) -> None:
        """Return if any engine serves; ejected ones are asked again.

        Raises:
            EngineUnavailableError: None does.
        """
        await self._fleet.revive()
        members = list(self._fleet.well().values())
        well = await asyncio.gather(*[self._fleet.check(each, patient=False) for each in members])
        if not any(well):
            self._fleet.choose(session=None, images=(), preferred=None, avoided=())

    async def teardown(self, *, wait: float = 0.0) -> None:
        """Take no more work, let what runs go on for `wait` seconds, end it, and close the engines."""
        if not self._gate.close():
            return
        members = list(self._fleet.members.values())
        try:
            if wait > 0:
                async with asyncio.timeout(wait):
                    await quiet(members)
        except TimeoutError:
            pass
        finally:
            for member in members:
                for call in list(member.calls):
                    call.end("aborted")
            await quiet(members)
            await self._dispatcher.monitor.stop()
            results = await asyncio.gather(
                *[member.engine.teardown() for member in members], return_exceptions=True
            )
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _tell_tokens(engine: InferenceEngineInterface, renderer: Any) -> None:
    learn = getattr(engine, "learn_tokens", None)
    if learn is not None:
        learn(renderer)


async def _told(member: Member) -> None:
    """Abort at once what an engine has; requests that are still on their way follow later."""
    if member.ill is None and member.calls:
        await asyncio.gather(member.engine.abort_generation(), return_exceptions=True)


async def _limit_of(engine: InferenceEngineInterface) -> int | None:
    ask = getattr(engine, "max_prompt_len", None)
    try:
        return None if ask is None else await ask()
    except EngineError:
        return None  # whether it serves is found out by asking it for tokens


def _remade(
    cls: type[InferenceEngineClient],
    engines: Sequence[InferenceEngineInterface],
    renderer: Any,
    policy: ClientPolicy,
    name: str,
) -> InferenceEngineClient:
    return cls(engines, renderer=renderer, policy=policy, name=name)

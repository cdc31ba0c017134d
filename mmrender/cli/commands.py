"""The commands. Needs the `cli` extra."""

import json
import os
import sys
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from mmrender._version import __version__
from mmrender.cli.inputs import (
    OPTIONS,
    conversation_in,
    is_trajectories,
    load,
    load_for_tokens,
    log,
    read_document,
    render_conversation,
    renderable,
)
from mmrender.cli.overview import STATUSES
from mmrender.errors import InputError, MMRenderError, importing
from mmrender.media.pixels import ImageBackend
from mmrender.model.files import find_model
from mmrender.sidecar import common_prefix

if TYPE_CHECKING:
    from mmrender.client.resolve import BackendName
    from mmrender.view import Page

with importing("typer", "cli", "the mmrender command"):
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=f"Exit status: {', '.join(f'{status} {meaning}' for status, meaning in STATUSES.items())}",
)

_out = Console()

ModelArgument = Annotated[str, typer.Argument(help="Model directory or hub id.", metavar="MODEL")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="Model directory or hub id.")]
FileArgument = Annotated[
    str,
    typer.Argument(help='JSON: a list of messages, or {"messages", "tools", ...}; "-" is standard input.'),
]
BackendOption = Annotated[
    str, typer.Option("--image-backend", help='"torch", as inference engines, or "pil".')
]
TokensBackendOption = Annotated[
    str | None,
    typer.Option(
        "--image-backend",
        help='"torch" or "pil". Default: "torch" for a page. For tokens alone "pil", if both have the same.',
        show_default=False,
    ),
]
PromptOption = Annotated[
    bool | None,
    typer.Option(
        help="Open the assistant's turn. Default: unless the last message is the assistant's.",
        show_default=False,
    ),
]
PageOption = Annotated[
    Path | None, typer.Option("--html", help="Write a page for a browser to this file instead.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EngineOption = Annotated[str, typer.Option(help='Engine of the server: "vllm", "sglang" or "dynamo".')]


def _print_version(requested: bool) -> None:
    if requested:
        _out.out(f"mmrender {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model directory. Read it first.")
    ] = False,
) -> None:
    """Render multimodal chat exactly, and look at rendered, sampled and trained tokens."""
    OPTIONS["trust_remote_code"] = trust_remote_code


@app.command()
def render(
    file: FileArgument,
    model: ModelOption,
    generation_prompt: PromptOption = None,
    image_backend: BackendOption = "torch",
) -> None:
    """Render a conversation and print ids, spans and media as JSON."""
    conversation = conversation_in(read_document(file), file)
    rendered = render_conversation(conversation, load(model, image_backend), generation_prompt)
    data = rendered.multi_modal_data
    document = {
        "token_ids": rendered.token_ids,
        "spans": [span._asdict() for span in rendered.spans],
        "roles": rendered.roles,
        "rewritten": rendered.rewritten,
        "answer_only": rendered.answer_only,
        "mm_hashes": data.mm_hashes,
        "mm_placeholders": {
            modality: [
                {"offset": entry.offset, "length": entry.length, "embed_spans": entry.embed_spans}
                for entry in ranges
            ]
            for modality, ranges in data.mm_placeholders.items()
        },
        "mm_grids": {modality: [item.grid for item in items] for modality, items in data.mm_items.items()},
    }
    _out.out(json.dumps(document), highlight=False)


@app.command()
def view(
    file: Annotated[
        str,
        typer.Argument(help='JSON as for `render`, "-" for standard input, or a file of saved trajectories.'),
    ],
    model: ModelOption,
    *,
    generation_prompt: PromptOption = None,
    image_backend: TokensBackendOption = None,
    html: PageOption = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON with the tools. Default: the tools that the trajectories keep.")
    ] = None,
) -> None:
    """Show every token, coloured by kind: in the terminal, or as one self-contained page."""
    from mmrender.view.terminal import legend, message_table, token_strip

    if is_trajectories(file):
        return _view_trajectories(Path(file), model, image_backend, html, tools)
    renderer = load_for_tokens(model, image_backend, html)
    rendered = render_conversation(conversation_in(read_document(file), file), renderer, generation_prompt)
    if html is not None:
        from mmrender.view import Page

        return _save(Page(rendered, names=[Path(file).name]), html)
    _out.print(legend(), "")
    _out.print(token_strip(rendered), "", soft_wrap=not _out.is_terminal)  # a pipe's lines are the tokens'
    _out.print(message_table(rendered))


def _view_trajectories(
    file: Path, model: str, image_backend: str | None, html: Path | None, tools: Path | None
) -> None:
    from mmrender.trajectory import load_trajectories
    from mmrender.view import Page

    if html is None:
        remedy = "Name a file for a page: --html tokens.html"
        raise InputError("trajectories are shown as a page", where=str(file), remedy=remedy)
    renderer = load(model, image_backend or "torch")
    offered = None if tools is None else read_document(str(tools))
    with log.status("reading"):
        trajectories = load_trajectories(file)
    if not trajectories:
        raise InputError("the file is without trajectories", where=str(file))
    with log.status("rendering"):
        page = Page(*trajectories, renderer=renderer, tools=offered, title=file.name)
    _save(page, html)


def _save(page: "Page", path: Path) -> None:
    try:
        page.save(path)
    except OSError as error:
        raise InputError("cannot write the page", where=str(path), got=error.strerror) from error
    log.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="JSON as for `render`, or with token_ids as it prints.")],
    second: Annotated[str, typer.Argument(help='The same. One of the two may be "-".')],
    model: ModelOption,
    *,
    generation_prompt: PromptOption = None,
    image_backend: TokensBackendOption = None,
    html: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two renderings token by token and show the first difference. Exit 1 if they differ."""
    from mmrender.view.terminal import difference

    if first == second == "-":
        remedy = "Name a file for one of the two"
        raise InputError("standard input is read once, not twice", where="-", remedy=remedy)
    renderer = load_for_tokens(model, image_backend, html)
    pair = [renderable(file, renderer, generation_prompt) for file in (first, second)]
    names = (first, second) if first != second else (f"{first} (1)", f"{second} (2)")
    equal = common_prefix(pair[0].token_ids, pair[1].token_ids)
    differ = equal < max(map(len, pair))
    if html is not None:
        from mmrender.view import Page

        _save(Page.of_difference(*pair, renderer=renderer, names=names), html)
    elif as_json:
        lengths = [len(one) for one in pair]
        found = {"equal": not differ, "first_difference": equal if differ else None, "lengths": lengths}
        _out.out(json.dumps(found), highlight=False)
    else:
        _out.print(difference(pair[0], pair[1], names, renderer.decode))
    raise typer.Exit(1 if differ else 0)


@app.command()
def doctor(
    model: ModelArgument,
    image_backend: BackendOption = "pil",
    as_json: JsonOption = False,
) -> None:
    """Print the findings about a model's template, tokenizer and processor, and their proofs.

    Exit 1 if there are problems: something that cannot be rendered exactly, or is unknown.
    """
    from mmrender.view.doctor import diagnose, findings_table, next_steps

    renderer = load(model, image_backend)
    with log.status("probing"):
        findings = diagnose(renderer, find_model(model).path)
    if as_json:
        _out.out(json.dumps(findings, indent=2), highlight=False)
    else:
        _out.print(findings_table(findings))
        _out.print("what to do", style="bold")
        for step in next_steps(findings, model):
            _out.print(f"  {step}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if findings["problems"] else 0)


@app.command()
def parity(
    models: Annotated[list[Path], typer.Argument(help="Model directories.", metavar="MODEL...")],
    cases: Annotated[int, typer.Option(min=1, help="Conversations for each model and back end.")] = 300,
    image_backend: Annotated[str, typer.Option(help='"torch", "pil" or "both".')] = "both",
    seed: Annotated[int, typer.Option(help="Seed of the generated conversations.")] = 0,
    images: Annotated[Path | None, typer.Option(help="Folder of photographs to use as well.")] = None,
    *,
    bridge: Annotated[
        bool, typer.Option("--bridge", help="Compare bridged turns with rendering the whole conversation.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Compare with the reference, Transformers, to the last bit.

    Exit 1 if something differs, else 2 if something could not be compared, such as a model's images.
    """
    from mmrender.testing.conversations import load_pictures
    from mmrender.testing.parity import check_parity
    from mmrender.testing.reports import parity_status, parity_table

    if bridge:
        mode = "pil" if image_backend == "both" else image_backend
        return _bridge_parity(models, cases, seed, mode, as_json=as_json)

    backends: list[ImageBackend] = (
        ["torch", "pil"] if image_backend == "both" else [cast(ImageBackend, image_backend)]
    )
    pictures = load_pictures(images) if images is not None else []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    reports = []
    with Progress(*columns, console=log) as bars:
        for model, backend in product(models, backends):
            bar = bars.add_task(f"{model.name} {backend}", total=cases)
            report = check_parity(
                model,
                image_backend=backend,
                cases=cases,
                seed=seed,
                pictures=pictures,
                progress=partial(bars.advance, bar),
                trust_remote_code=OPTIONS["trust_remote_code"],
            )
            reports.append(report)
    if as_json:
        _out.out(json.dumps([report.counts() for report in reports], indent=1), highlight=False)
    printed = log if as_json else _out
    printed.print(parity_table(reports))
    write = partial(printed.print, markup=False, highlight=False, soft_wrap=True)
    for report in reports:
        for number, line in enumerate(report.problem(seed)):
            write(line if number else f"\n{line}", style=None if number else "red")
        for note in report.notes():
            write(f"{report.model}, {report.image_backend}: {note}")
    raise typer.Exit(parity_status(reports))


def _bridge_parity(models: list[Path], cases: int, seed: int, image_backend: str, *, as_json: bool) -> None:
    """Print how bridges compare with full renderings, as Markdown or JSON. Exit 1 if a bridge is wrong."""
    from mmrender.testing.bridge_parity import BridgeReport, check_bridge

    write = partial(_out.print, markup=False, highlight=False, soft_wrap=True)
    reports: list[BridgeReport] = []
    for model in models:
        renderer = load(str(model), image_backend)
        with log.status(f"bridging {model.name}"):
            reports.append(check_bridge(renderer, model.name, cases=cases, seed=seed))
        if not as_json:
            write("\n".join([*(BridgeReport.HEADER if len(reports) == 1 else ()), reports[-1].row()]))
    if as_json:
        _out.out(json.dumps([report.counts() for report in reports], indent=1), highlight=False)
    problems = [problem for report in reports for problem in report.problems()]
    for problem in problems[:3]:
        (log if as_json else _out).print(f"\n{problem}", markup=False, highlight=False)
    raise typer.Exit(1 if problems else 0)


@app.command()
def demo(
    server: Annotated[
        str | None,
        typer.Option(help="Base URL of an inference server. Default: a tiny model here."),
    ] = None,
    backend: EngineOption = "vllm",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name under which the server knows the model.")
    ] = None,
    renderer: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of the model, if the server uses another name for it."),
    ] = None,
    html: Annotated[
        Path, typer.Option("--html", help="File of the page with everything that was shown.")
    ] = Path("mmrender-demo.html"),
) -> None:
    """Run the demonstration: here, or its rollouts against an inference server."""
    if server is not None:
        if model is None:
            expected = "the name it is served by"
            raise InputError("the server's model is not named", where="--model", expected=expected)
        # The demonstration itself stays off the hub, but a served model may come from there.
        os.environ.setdefault("HF_HUB_OFFLINE", "0")
    from mmrender.testing.demo import main as demonstrate

    engine = _engine(backend) if server else None
    raise typer.Exit(demonstrate(server, backend=engine, model=model, renderer_of=renderer, page=html))


@app.command()
def gateway(
    urls: Annotated[
        list[str], typer.Argument(help="Base URLs of running inference servers.", metavar="URL...")
    ],
    model: ModelOption,
    *,
    out: Annotated[
        Path,
        typer.Option(help="File of finished trajectories. Sessions are kept beside it until they finish."),
    ],
    engine_model: Annotated[
        str | None, typer.Option(help="The servers' name of the model. Default: --model.")
    ] = None,
    backend: EngineOption = "vllm",
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, or 0 for any free port.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="MMRENDER_API_KEY", help="Key of a caller. May be repeated.", show_default=False),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL: calls of this model go to that server, unrecorded.", metavar="NAME=URL"),
    ] = None,
    alias_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="MMRENDER_ALIAS_KEY",
            help="NAME=KEY: key of that server.",
            metavar="NAME=KEY",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Branch if an answer comes back changed, instead of keeping its tokens.")
    ] = False,
    sync: Annotated[
        bool, typer.Option(help="Wait for the disk with each turn, so that it survives a power failure.")
    ] = False,
) -> None:
    """Answer agents over inference servers, and record the sampled tokens."""
    import asyncio

    from mmrender.gateway import Gateway, GatewaySettings

    aliases, alias_keys = (
        dict(pair.partition("=")[::2] for pair in pairs or ()) for pairs in (alias, alias_key)
    )
    if not all(name and target for name, target in aliases.items()):
        raise InputError("an alias has no name or no URL", where="--alias", expected="NAME=URL")
    if unknown := alias_keys.keys() - aliases.keys():
        raise InputError("a key belongs to no alias", where="--alias-key", got=min(unknown)[:40])
    running = Gateway(
        urls,
        load(model, "torch", files=False),
        model=engine_model or model,
        out=out,
        settings=GatewaySettings(host=host, port=port, api_key=api_key or None, strict=strict, sync=sync),
        backend=_engine(backend),
        aliases=aliases,
        alias_keys=alias_keys,
    )

    async def run() -> None:
        async with running:
            await running.serve(started=lambda url: log.print(f"{model} at {url}/s/NAME/v1", markup=False))

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


def _engine(name: str) -> "BackendName":
    from mmrender.client.resolve import resolve_backend

    resolve_backend(cast("BackendName", name), "")  # raises for an unknown name
    return cast("BackendName", name)


@app.command()
def audit(
    files: Annotated[
        list[Path], typer.Argument(help="Files of saved trajectories.", metavar="TRAJECTORY...")
    ],
    model: ModelOption,
    *,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Nats per token. Larger differences are reported. Default: measured."),
    ] = None,
    explain: Annotated[int, typer.Option(min=0, help="Number of differing samples to diagnose.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of the model, such as cuda.")] = "cpu",
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a page for a browser to this file, too.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the model over the trainer's input and compare with the sampler.

    Exit 1 if they differ, 2 if nothing was compared.
    """
    from mmrender.audit.files import audit_files

    with log.status("loading") as status:
        report = audit_files(
            files,
            model,
            tolerance=tolerance,
            explain=explain,
            dtype=dtype,
            device=device,
            progress=status.update,
        )
    if html is not None:
        from mmrender.view import Page

        _save(Page(report, title="Audit"), html)
    _out.out((json.dumps(report.plain(), indent=1) if as_json else report.text()), highlight=False)
    raise typer.Exit(0 if report.ok else 1 if report.tokens else 2)


def run() -> None:
    """Run the command. An error of mmrender ends it with one line and status 2."""
    try:
        app()
    except MMRenderError as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        log.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)

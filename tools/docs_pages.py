"""MkDocs hook: pages of public names, errors and the wire from the sources, the tour, the live page.

A public name is one that a package's `__init__.pyi` lists. API pages are parsed from sources, never imported.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page as SitePage

from tour_script import TOUR, cells, tour_script

ROOT = Path(__file__).resolve().parent.parent
STUBS = (ROOT / "mmrender", ROOT / "codecs" / "mmcodecs")


@dataclass(frozen=True)
class Page:
    """One API page: the public names of a package, by where they are defined."""

    name: str
    members: tuple[str, ...]
    summary: str

    @property
    def uri(self) -> str:
        """Path of the page below the documentation folder."""
        return f"api/{self.name}.md"

    @property
    def markdown(self) -> str:
        """The page: a directive for each name, which mkdocstrings fills."""
        directives = [f"::: {member}\n" for member in self.members]
        return "\n".join(
            [f"---\ntitle: {self.name}\n---\n", f"# {self.name}\n", self.summary, "", *directives]
        )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API pages at the end of the reference, and the version into the name of the site."""
    entries = [{page.name: page.uri} for page in pages()]
    (reference,) = (entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    reference.append({"API": ["api/index.md", *entries]})
    config.site_name = f"{config.site_name} {version()}"
    return config


def version() -> str:
    """The version that is documented."""
    tree = ast.parse((ROOT / "mmrender" / "_version.py").read_text("utf-8"))
    (value,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    return str(ast.literal_eval(value))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those that lie in the documentation folder."""
    for page in pages():
        files.append(File.generated(config, page.uri, content=page.markdown))
    files.append(File.generated(config, "api/index.md", content=index()))
    files.append(File.generated(config, "errors.md", content=errors_page()))
    files.append(File.generated(config, "wire.md", content=wire_page()))
    files.append(File.generated(config, "live.html", content=live_page()))
    files.append(File.generated(config, "tour.md", content=tour_page()))
    files.append(File.generated(config, TOUR.name, content=TOUR.read_text("utf-8")))
    files.append(File.generated(config, "tour.py", content=tour_script()))
    return files


WHOLE_FILE = re.compile(r'\A--8<-- "(\w+\.md)"\s*\Z')
EXAMPLES = re.compile(r"\bexamples/[\w./-]*\w")
MAKE = re.compile(r"(?:`|```bash\n)make [a-z]")
FOR_DEVELOPERS = ("contributing.md", "architecture.md", "decisions.md", "changelog.md")


def on_page_markdown(markdown: str, page: SitePage, config: MkDocsConfig, **_: object) -> str:
    """Include a file of the root, whose links lead into `docs`, and say where files of the sources are."""
    if whole := WHOLE_FILE.match(markdown):
        markdown = (ROOT / whole[1]).read_text("utf-8").replace("](docs/", "](")
    if page.file.src_uri in FOR_DEVELOPERS or not names_sources(markdown):
        return markdown
    place = f"[the repository]({config.repo_url})" if config.repo_url else "its repository"
    note = (
        '!!! note "From the sources"\n'
        "    `examples`, `benchmarks`, `tests`, `tools` and `make` are not in the wheel. "
        f"What this page says of them needs a checkout of {place}, or the source distribution.\n\n"
    )
    heading = re.search(r"^## ", markdown, re.MULTILINE)
    cut = heading.start() if heading else len(markdown)
    return f"{markdown[:cut].rstrip()}\n\n{note}{markdown[cut:]}"


def names_sources(markdown: str) -> bool:
    """Whether a page names one of our examples, or a target of `make`."""
    paths = (ROOT / found[0] for found in EXAMPLES.finditer(markdown))
    return MAKE.search(markdown) is not None or any(path.exists() for path in paths)


def on_page_content(html: str, **_: object) -> str:
    """Make the empty corner of a table a plain cell: a screen reader announces a header without words."""
    return re.sub(r"<th( [^>]*)?></th>", r"<td\1></td>", html)


def tour_page() -> str:
    """The notebook as a page, which is where its links lead from."""
    blocks = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells()]
    page = "\n\n".join(blocks).replace("](../docs/", "](") + "\n"
    page = page.replace("`examples/tour.ipynb`", "[`tour.ipynb`](tour.ipynb)")
    return page.replace("`python tools/tour_script.py > tour.py`", "[`tour.py`](tour.py)")


def live_page() -> str:
    """A page of tokens with the script and the style of this checkout. `make screenshots` writes its data."""
    from mmrender.view.page import as_html

    return as_html(json.loads((ROOT / "docs" / "live.json").read_text("utf-8")))


def pages() -> Iterator[Page]:
    """Yield the pages: `mmrender`, its packages in alphabetical order, and the codec."""
    for root in STUBS:
        for stub in sorted(root.glob("**/__init__.pyi")):
            parts = stub.parent.relative_to(root.parent).parts
            yield page_of(stub, ".".join(parts))


def page_of(stub: Path, name: str) -> Page:
    """Describe the page of one package."""
    members = [
        ".".join((name, node.module, alias.name))
        for node in ast.parse(stub.read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if not alias.name.startswith("_") and not node.module.startswith("errors")
    ]
    return Page(name, tuple(members), summary_of(stub.with_suffix(".py")))


def summary_of(path: Path) -> str:
    """First line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path.is_file() else None
    return (docstring or "").partition("\n")[0]


def index() -> str:
    """The overview: every page with the first line of its docstring."""
    rows = [f"| [`{page.name}`]({page.name}.md) | {page.summary} |" for page in pages()]
    return "\n".join(["# API", "", "| module | what it is |", "|---|---|", *rows, ""])


WIRE = {"wire": "Messages", "arrays": "Arrays", "shared": "Shared arrays", "files": "Record files"}


def wire_page() -> str:
    """The specification: what the modules that write and read the wire say of it."""
    lines = [
        "# Wire specification",
        "",
        "![A message as frames, and as one buffer](images/diagram-wire.svg)",
        "",
    ]
    for name, heading in WIRE.items():
        tree = ast.parse((ROOT / "codecs" / "mmcodecs" / f"{name}.py").read_text("utf-8"))
        lines += [f"## {heading}", "", ast.get_docstring(tree) or "", ""]
    lines.append(
        "`tests/data/wire` holds test vectors; `examples/read_frames.py` reads it with msgpack and numpy."
    )
    return "\n".join([*lines, ""])


def errors_page() -> str:
    """The docstring of each module of errors, and a table of its classes."""
    lines = ["# Errors", ""]
    for path, module in (
        (ROOT / "mmrender" / "errors.py", "mmrender.errors"),
        (ROOT / "codecs" / "mmcodecs" / "errors.py", "mmcodecs.errors"),
    ):
        tree = ast.parse(path.read_text("utf-8"))
        lines += [
            f"## `{module}`",
            "",
            ast.get_docstring(tree) or "",
            "",
            "| error | is a | when |",
            "|---|---|---|",
        ]
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
                what = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split()).replace(
                    "|", "\\|"
                )
                lines.append(f"| `{node.name}` | {bases} | {what} |")
        lines.append("")
    return "\n".join(lines)

"""MkDocs hook: one API page for each public module or subpackage, made from what the sources hold.

Nothing is listed by hand, so no module can be forgotten. The sources are parsed, never imported.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "mmrender", ROOT / "codecs" / "mmcodecs")


@dataclass(frozen=True)
class Page:
    """One API page: a module, or a subpackage with its modules."""

    name: str
    modules: tuple[str, ...]
    summary: str

    @property
    def uri(self) -> str:
        """Path of the page below the documentation folder."""
        return f"api/{self.name}.md"

    @property
    def markdown(self) -> str:
        """The page: a directive for each module, which mkdocstrings fills."""
        directives = [f"::: {module}\n" for module in self.modules]
        return "\n".join([f"---\ntitle: {self.name}\n---\n", f"# {self.name}\n", *directives])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API pages at the end of the navigation."""
    entries = [{page.name: page.uri} for page in pages()]
    config.nav = [*(config.nav or []), {"API": ["api/index.md", *entries]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those that lie in the documentation folder."""
    for page in pages():
        files.append(File.generated(config, page.uri, content=page.markdown))
    files.append(File.generated(config, "api/index.md", content=index()))
    return files


def pages() -> Iterator[Page]:
    """Yield the pages, those of each package in alphabetical order."""
    for package in PACKAGES:
        if package.name == "mmcodecs":
            yield page_of(package, package.name)
            continue
        for path in sorted(package.iterdir(), key=lambda path: path.stem):
            if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").is_file()):
                yield page_of(path, f"{package.name}.{path.stem}")


def page_of(path: Path, name: str) -> Page:
    """Describe the page of one module or package."""
    if path.is_file():
        return Page(name, (name,), summary_of(path))
    submodules = [
        ".".join((name, *module.relative_to(path).with_suffix("").parts))
        for module in sorted(path.rglob("*.py"))
        if not any(part.startswith("_") for part in module.relative_to(path).parts)
    ]
    return Page(name, (name, *submodules), summary_of(path / "__init__.py"))


def summary_of(path: Path) -> str:
    """First line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path.is_file() else None
    return (docstring or "").partition("\n")[0]


def index() -> str:
    """The overview: every page with the first line of its docstring."""
    rows = [f"| [`{page.name}`]({page.name}.md) | {page.summary} |" for page in pages()]
    return "\n".join(["# API", "", "| module | what it is |", "|---|---|", *rows, ""])

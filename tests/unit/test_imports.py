"""Imports run one way, without a circle, and load heavy packages at first use alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mmcodecs
import mmrender

ROOTS = {package.__name__: Path(package.__file__).parent for package in (mmrender, mmcodecs)}


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file of a package."""
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path, root): path for root in ROOTS.values() for path in root.rglob("*.py")}


def stub_names(name: str) -> dict[str, str]:
    """Return the module of each name that a package's `__init__.pyi` lists."""
    stub = FILES[name].with_suffix(".pyi")
    if FILES[name].name != "__init__.py" or not stub.exists():
        return {}
    return {
        alias.name: f"{name}.{node.module}"
        for node in ast.walk(ast.parse(stub.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


STUBS = {name: stub_names(name) for name in FILES}


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name in it) of each import, and of each string that is passed to `import_module`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, "") for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((module, alias.name) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[first, *_]
            ):
                # Of an f-string, the text before its first value names the package at least.
                text = first.values[0] if isinstance(first, ast.JoinedStr) else first
                if isinstance(text, ast.Constant):
                    yield str(text.value).rstrip("."), "*"


def modules_of(module: str, name: str) -> set[str]:
    """Return the modules of these packages that an import of a name needs."""
    if name == "*":
        return {other for other in FILES if other.startswith(f"{module}.")} or {module} & FILES.keys()
    target = STUBS.get(module, {}).get(name) or (
        f"{module}.{name}" if f"{module}.{name}" in FILES else module
    )
    return {target} & FILES.keys()


def imports_of(name: str) -> set[str]:
    """Return the modules of these packages that a module imports anywhere in its source."""
    tree = ast.parse(FILES[name].read_text())
    return {target for module, part in imported_names(tree) for target in modules_of(module, part)} - {name}


def test_no_module_imports_itself_through_others() -> None:
    """Also through strings, functions, lazily loaded names and `TYPE_CHECKING`."""
    graph = {name: imports_of(name) for name in FILES}
    assert sum(map(len, graph.values())) > len(FILES)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


CLIENT = "aiohttp opentelemetry torch transformers vllm"
SERVING = "aiohttp starlette uvicorn prometheus_client torch transformers"
WORKER = "aiohttp transformers mmrender.renderer mmrender.client zmq"
LIGHT = {
    "import mmrender": "numpy PIL jinja2 tokenizers",
    "import mmcodecs; mmcodecs.encode([1])": "torch vllm mmrender xxhash blake3 pydantic asyncio",
    "import mmrender.shipping": "torch asyncio",
    "import mmrender.training": "torch numpy",
    "from mmrender.training import *": WORKER,
    "import mmrender.engines as e; e.InferenceEngineClient; e.HTTPEngine": SERVING,
    "from mmrender import generate; from mmrender.client import EngineRequest, SGLangBackend, VLLMBackend": CLIENT,
    "from mmrender.client.transport import RetryPolicy, TransportConfig": CLIENT,
}  # fmt: skip
"""Statements, and the modules that they do not load."""


@pytest.mark.parametrize("statement", LIGHT)
def test_an_import_loads_nothing_heavy_and_starts_no_thread(statement: str) -> None:
    code = f"import sys, threading\n{statement}\nprint({{*sys.argv[1:]}} & {{*sys.modules}}, threading.active_count())"
    command = [sys.executable, "-c", code, *LIGHT[statement].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set() 1\n"

"""The pattern by which a tiktoken tokenizer cuts text, read from the Python code of a model directory.

A `tiktoken.model` holds tokens alone. The pattern is written in the directory's `tokenization_*.py`, as an
argument of `tiktoken.Encoding`. It is read from there without running the code: text, joined text, and names
that have one value in the whole file.
"""

import ast
from pathlib import Path

from mmrender.model.files import ModelDir

_MAX_BYTES = 1 << 20
"""Maximum size of a file of code."""
_MAX_DEPTH = 16
"""Maximum number of names and operators between an argument and its text."""


def declared_pattern(model: ModelDir) -> str | None:
    """Return the pattern that the tokenizer's code declares, or None without one that can be read."""
    for file in _code_files(model):
        try:
            content = file.read_bytes()
            if len(content) <= _MAX_BYTES and (pattern := _pattern_of(ast.parse(content))):
                return pattern
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _code_files(model: ModelDir) -> list[Path]:
    """Return the file that `tokenizer_config.json` names, then other files of tokenizers."""
    named = model.tokenizer_config.get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    entries = [entry for entry in classes or () if isinstance(entry, str)] if classes != str(classes) else []
    modules = [entry.rpartition(".")[0] for entry in entries]
    files = [model.path / f"{name}.py" for name in modules if name.isidentifier()]
    files += sorted(model.path.glob("tokenization*.py"))
    return [file for file in dict.fromkeys(files) if file.is_file()]


def _pattern_of(tree: ast.AST) -> str | None:
    values: dict[str, list[ast.expr]] = {}
    arguments: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values.setdefault(_name_of(target), []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            values.setdefault(_name_of(node.target), []).append(node.value)
        elif isinstance(node, ast.Call) and _name_of(node.func) == "Encoding":
            arguments += [keyword.value for keyword in node.keywords if keyword.arg == "pat_str"]
    patterns = {_text_of(argument, values, 0) for argument in arguments}
    return patterns.pop() if len(patterns) == 1 else None


def _name_of(node: ast.expr) -> str:
    """Return a name, or the last name of an attribute; empty for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text_of(node: ast.expr, values: dict[str, list[ast.expr]], depth: int) -> str | None:
    """Return the text that an expression has wherever the code is run, or None."""
    if depth > _MAX_DEPTH:
        return None
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name() | ast.Attribute():
            texts = {_text_of(value, values, depth + 1) for value in values.get(_name_of(node), ())}
            return texts.pop() if len(texts) == 1 else None
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pieces = [left, right]
            separator: str | None = ""
        case ast.Call(
            func=ast.Attribute(value=ast.Constant() as middle, attr="join"),
            args=[ast.List(elts=pieces) | ast.Tuple(elts=pieces)],
            keywords=[],
        ):
            separator = _text_of(middle, values, depth + 1)
        case _:
            return None
    texts_of_pieces = [_text_of(piece, values, depth + 1) for piece in pieces]
    if separator is None or None in texts_of_pieces:
        return None
    return separator.join(text for text in texts_of_pieces if text is not None)

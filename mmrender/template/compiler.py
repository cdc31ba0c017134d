"""Compile-time side of provenance: marks in a template's loops, and calls in place of Jinja's plain joins.

The template's own loop over the messages says which message scaffold belongs to. Each `for` body begins with
a mark that carries the message of this iteration, if the loop runs over messages, and the loop is followed by
a mark that ends it. `{% set message = messages[i] %}` is followed by a mark of the message that it looked up.
`environment.Joiner` reads the marks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Literal, TypeAlias

import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.parser import Parser
from jinja2.runtime import Macro

from mmrender.template.text import Origin

MarkKind: TypeAlias = Literal["enter", "look", "leave"]
Mark: TypeAlias = tuple[int, MarkKind, Origin | None]
"""Number of a loop, event of an iteration (begin, look-up of a message, end), and origin of its message."""


def instrument(tree: nodes.Template) -> nodes.Template:
    """Put marks into every loop of a parsed template."""
    _mark_bodies(tree, None, [0])
    return tree


def _mark_bodies(node: nodes.Node, loop: int | None, count: list[int]) -> None:
    """Mark the loops inside `node`, which lies in loop number `loop`; `count` numbers them."""
    for _, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for child in [child for child in children if isinstance(child, nodes.Node)]:
            if isinstance(child, nodes.For):
                count[0] += 1
                number = count[0]
                _mark_bodies(child, number, count)
                target = child.target if isinstance(child.target, nodes.Name) else None
                child.body.insert(0, _mark(number, "enter", target, child))
                value.insert(_place(value, child) + 1, _mark(number, "leave", None, child))
            else:
                inside = None if isinstance(child, nodes.Macro | nodes.CallBlock) else loop
                _mark_bodies(child, inside, count)
                if isinstance(child, nodes.Assign) and inside is not None and _looks_up(child):
                    value.insert(_place(value, child) + 1, _mark(inside, "look", child.target, child))


def names_read(body: list[nodes.Node], assigned: set[str]) -> set[str]:
    """Names that a template may look up before it has assigned them itself.

    Statements are followed in order, as Jinja scopes them. A name that each branch of an `if` assigns stays
    assigned; names that a loop, a macro or a block assigns end with it.

    Args:
        body: Statements or expressions.
        assigned: Names assigned before the body; the names that it assigns are added.
    """
    names: set[str] = set()
    for node in body:
        match node:
            case nodes.Name():
                names |= {node.name} - assigned if node.ctx == "load" else set()
            case nodes.NSRef():
                names |= {node.name} - assigned
            case nodes.If():
                tests = [node.test, *[branch.test for branch in node.elif_]]
                names |= names_read(tests, assigned)
                branches = [node.body, *[branch.body for branch in node.elif_], node.else_]
                after = [set(assigned) for _ in branches]
                for branch, ends in zip(branches, after, strict=True):
                    names |= names_read(branch, ends)
                assigned |= set.intersection(*after)
            case nodes.For():
                inside = assigned | _bound(node.target) | {"loop"}
                names |= names_read([node.iter], assigned)
                names |= names_read([node.test] if node.test is not None else [], inside)
                names |= names_read(node.body, inside) | names_read(node.else_, set(assigned))
            case _:
                inside = set(assigned)
                if isinstance(node, nodes.Macro | nodes.CallBlock):
                    inside.update(*map(_bound, node.args))
                if isinstance(node, nodes.Macro):
                    inside |= {"varargs", "kwargs", "caller"}
                names |= names_read(list(node.iter_child_nodes()), inside)
                if isinstance(node, nodes.Assign | nodes.AssignBlock):
                    assigned |= _bound(node.target)
                elif isinstance(node, nodes.Macro):
                    assigned.add(node.name)
    return names


def names_printed(tree: nodes.Template) -> set[str]:
    """Names that a template only prints or tests, outside loops and macros.

    The text of these names, unless it is empty, changes only its own characters of the output.
    """
    uses = Counter(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    printed = Counter(_printed(tree.body))
    return {name for name, count in printed.items() if count == uses[name]}


def _printed(body: Iterable[nodes.Node]) -> Iterator[str]:
    """Yield the names that statements print or test, once for each use."""
    for node in body:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                yield from _printed_by(child)
        elif isinstance(node, nodes.If):
            yield from _tested(node.test)
            yield from _printed((*node.body, *node.elif_, *node.else_))


def _printed_by(expression: nodes.Expr) -> Iterator[str]:
    match expression:
        case nodes.Name():
            yield expression.name
        case nodes.Add():
            for operand in _summands(expression):
                yield from _printed_by(operand)
        case nodes.Concat():
            for operand in expression.nodes:
                yield from _printed_by(operand)
        case nodes.CondExpr():
            yield from _tested(expression.test)
            yield from _printed_by(expression.expr1)
            if expression.expr2 is not None:
                yield from _printed_by(expression.expr2)


def _tested(test: nodes.Node) -> Iterator[str]:
    match test:
        case nodes.Name():
            yield test.name
        case nodes.Not():
            yield from _tested(test.node)
        case nodes.And() | nodes.Or():
            yield from _tested(test.left)
            yield from _tested(test.right)
        case nodes.Test(name="defined" | "undefined" | "none" | "string", node=nodes.Name(name=name)):
            yield name


def _bound(target: nodes.Node) -> set[str]:
    """Names that an assignment, a loop or a macro's parameter binds."""
    if isinstance(target, nodes.Name):
        return {target.name}
    return set[str]().union(*map(_bound, target.iter_child_nodes()))


def _place(body: list[nodes.Node], node: nodes.Node) -> int:
    # By identity: nodes compare by value.
    return next(index for index, item in enumerate(body) if item is node)


def _looks_up(node: nodes.Assign) -> bool:
    """Whether `{% set name = sequence[index] %}`, with an index that is not a key."""
    source = node.node
    if not isinstance(node.target, nodes.Name) or not isinstance(source, nodes.Getitem):
        return False
    return not isinstance(source.arg, nodes.Slice) and not (
        isinstance(source.arg, nodes.Const) and isinstance(source.arg.value, str)
    )


def _mark(loop: int, kind: MarkKind, shown: nodes.Expr | None, near: nodes.Node) -> nodes.Output:
    value = nodes.Name(shown.name, "load") if isinstance(shown, nodes.Name) else nodes.Const(None)
    output = nodes.Output([value], lineno=near.lineno)
    output.mark = (loop, kind)  # type: ignore[attr-defined]
    return output


class TracingCodeGenerator(CodeGenerator):
    """Calls the environment where Jinja writes plain Python, which loses spans."""

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 - Jinja calls it so
        """Write an output of the template, or a mark of `instrument`."""
        mark = getattr(node, "mark", None)
        if mark is not None:
            self.writeline("yield " if frame.buffer is None else f"{frame.buffer}.append(")
            after = ")" if frame.buffer is None else "))"
            self._call(f"environment.marked({mark[0]!r}, {mark[1]!r}, ", node.nodes, after, frame)
            return
        for is_sum, children in groupby(node.nodes, lambda child: isinstance(child, nodes.Add)):
            if not is_sum or frame.require_output_check:
                super().visit_Output(nodes.Output(list(children), lineno=node.lineno), frame)
                continue
            for child in children:
                # Outputs are joined once, so the operands stay separate here.
                self.writeline("yield from " if frame.buffer is None else f"{frame.buffer}.extend(", child)
                after = "))" if frame.buffer is None else ")))"
                self._call("environment.summands((", _summands(child), after, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        """Begin an output, which is already text, since the environment's finalizer returns text."""
        self.write(finalize.src)

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        """End the output that `_output_child_pre` began."""
        self.write(")")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the join of the operands as text; Jinja's helper joins plain text."""
        self._call("environment.joined((", node.nodes, "))", frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write a chain of additions as one call, which joins texts once."""
        self._call("environment.added((", _summands(node), "))", frame)

    def _call(self, before: str, operands: list[nodes.Expr], after: str, frame: Frame) -> None:
        self.write(before)
        for operand in operands:
            self.visit(operand, frame)
            self.write(", ")
        self.write(after)


def _summands(node: nodes.Expr) -> list[nodes.Expr]:
    """Operands of a chain of additions, from left to right."""
    operands: list[nodes.Expr] = []
    while isinstance(node, nodes.Add):
        operands.append(node.right)
        node = node.left
    return [node, *reversed(operands)]


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: a block with a scope that writes its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()

"""How a template is compiled: marks in its loops, provenance in `~`, bounds where Python has none."""

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.parser import Parser
from jinja2.runtime import Macro

from mmrender.template.ownership import instrument

_MAX_SOURCE = 2_000_000
_FEW = 64
"""A literal list with fewer elements is not worth counting."""


class TracingCodeGenerator(CodeGenerator):
    """Calls the environment where Jinja writes plain Python, which loses spans or cannot be bounded."""

    def write_commons(self) -> None:
        """Name what the functions of the template use."""
        super().write_commons()
        # Blocks of `autoescape` would otherwise use the plain ones.
        self.writeline("escape = environment.escape_text")
        self.writeline("Markup = environment.mark_text")

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 - Jinja calls it so
        """Write what the template prints, or a mark of `ownership.instrument`."""
        mark = getattr(node, "mark", None)
        if mark is None:
            super().visit_Output(node, frame)
            return
        self.writeline("yield " if frame.buffer is None else f"{frame.buffer}.append(")
        self.write(f"environment.marked({mark[0]!r}, {mark[1]!r}, ")
        self.visit(node.nodes[0], frame)
        self.write(")" if frame.buffer is None else f", len({frame.buffer})))")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write the join of the operands as text; Jinja's helper joins plain text."""
        escaping = (
            "context.eval_ctx.autoescape" if frame.eval_ctx.volatile else repr(frame.eval_ctx.autoescape)
        )
        self.write("environment.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(f"), {escaping})")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write a chain of additions as one: laid out once, where all of it is text."""
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self.write("environment.added(context, (")
        for operand in [left, *reversed(operands)]:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Write a comparison; two structures are compared only within the limits."""
        operands = [node.expr, *[operand.expr for operand in node.ops]]
        if len(node.ops) != 1 or any(_is_small(operand) for operand in operands):
            super().visit_Compare(node, frame)
            return
        self.write(f"environment.compared({node.ops[0].op!r}, ")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write(")")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Write a look-up: what a slice copies is counted, a structure as key is hashed within the limits."""
        if isinstance(node.arg, nodes.Const):
            super().visit_Getitem(node, frame)
        elif isinstance(node.arg, nodes.Slice):
            self.write("environment.counted(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", environment.hashed(")
            self.visit(node.arg, frame)
            self.write("))")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dict; a key that is a structure is hashed only within the limits."""
        self.write("environment.counted({" if len(node.items) > _FEW else "{")
        for item in node.items:
            self.write("" if isinstance(item.key, nodes.Const) else "environment.hashed")
            self.write("(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})" if len(node.items) > _FEW else "}")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """Write a list; a long one is counted."""
        self.write("environment.counted(" if len(node.items) > _FEW else "")
        super().visit_List(node, frame)
        self.write(")" if len(node.items) > _FEW else "")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """Write a tuple; a long one is counted."""
        counted = node.ctx == "load" and len(node.items) > _FEW
        self.write("environment.counted(" if counted else "")
        super().visit_Tuple(node, frame)
        self.write(")" if counted else "")


def _is_small(node: nodes.Expr) -> bool:
    """Whether comparing with the value of this expression is quick whatever the other side is."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: a block with its own scope that writes its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


def compile_template(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """Compile a template with marks in its loops.

    Raises:
        jinja2.TemplateSyntaxError: The source is not a template, or one that Python cannot run.
    """
    if len(source) > _MAX_SOURCE:
        raise jinja2.TemplateSyntaxError(f"longer than {_MAX_SOURCE:,} characters", 1)
    tree = instrument(environment.parse(source))
    try:
        code = environment.compile(tree)
    except (SyntaxError, MemoryError, ValueError) as error:
        # Python bounds the depth of blocks and of parentheses, and knows where `break` may stand.
        message = error.msg if isinstance(error, SyntaxError) else f"nested too deep: {error}"
        raise jinja2.TemplateSyntaxError(message, 1) from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None))

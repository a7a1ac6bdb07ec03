"""Jinja to Python in which nothing bypasses the sandbox: its extra statements, its code, its source's bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension
from jinja2.lexer import Token
from jinja2.parser import Parser

from localllm.models.template.meter import OverBudget

_MAX_TOKENS = 20_000  # five times the longest template of use; compiling them takes under a second
_MAX_BRACKETS, _MAX_BLOCKS = 100, 40
_BLOCKS = frozenset({"for", "if", "macro", "call", "filter", "with", "block", "generation", "autoescape"})
_OPENING, _CLOSING = frozenset({"lparen", "lbracket", "lbrace"}), frozenset({"rparen", "rbracket", "rbrace"})


class Statements(Extension):
    """`break`, `continue`, and `generation` blocks (which only mark the assistant's text for training)."""

    tags = {"break", "continue", "generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        token = next(parser.stream)
        if token.value == "generation":
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=token.lineno)
        return (nodes.Break if token.value == "break" else nodes.Continue)(lineno=token.lineno)


class CountingGenerator(CodeGenerator):
    """Generates code in which the operations that bypass the environment go through it too."""

    def _wrapped(self, hook: str, node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{hook}(")
        self.visit(node, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        counted = nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        node.iter = nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self._wrapped(node.node.name, node.args[0], frame)
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._operand("weighed", node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {operators[node.op]} ")
        self._operand("searched" if node.op in ("in", "notin") else "weighed", node.expr, frame)

    def _operand(self, hook: str, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._wrapped(hook, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("sliced", node.node, frame)
            self.write("[")
            self.visit(node.arg, frame)
            self.write("]")
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made({")
        for pair in node.items:
            self._operand("weighed", pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def _refuse(self, node: nodes.Node, frame: Frame) -> NoReturn:
        self.fail(f"{type(node).__name__} is not available in a chat template", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse  # noqa: N815
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse  # noqa: N815


def bounded_tokens(tokens: Iterator[Token]) -> Iterator[Token]:
    """Pass a template's tokens on. Raises: OverBudget for too many, or too deeply nested brackets or blocks."""
    brackets = blocks = 0
    previous = ""
    for n_tokens, token in enumerate(tokens):
        if token.type in _OPENING:
            brackets += 1
        elif token.type in _CLOSING:
            brackets -= 1
        elif previous == "block_begin":
            blocks += (token.value in _BLOCKS) - token.value.startswith("end")
        previous = token.type
        if brackets > _MAX_BRACKETS or blocks > _MAX_BLOCKS:
            raise OverBudget(f"it nests deeper than {_MAX_BRACKETS} brackets or {_MAX_BLOCKS} blocks")
        if n_tokens > _MAX_TOKENS:
            raise OverBudget(f"it has more than {_MAX_TOKENS} symbols")
        yield token

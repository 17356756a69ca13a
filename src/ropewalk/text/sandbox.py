"""The one Jinja environment in which chat templates run: sandboxed, immutable, and paying for what they do.

Templates see what they see in `transformers`: trimmed blocks, `break` and `continue`, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, and `{% generation %}` as a mere bracket. They cannot reach
Python's insides or change what they are given (Jinja's sandbox), nor run away with time or memory, which
the sandbox does not stop:

- a loop pays for each turn, a call, filter, test or operator for itself and for reading its operands;
- text pays for its length when it is put out, captured, joined, cut or compared;
- operations that make much out of little (`*`, `**`, `center`, `indent`, `replace`, …) pay beforehand;
- methods of strings, lists and dictionaries, and filters, are those listed in `payments`;
- nothing is computed at compile time, and the source has a limit.

`budget` holds the limits, `payments` the prices. What remains between two payments is a single operation on
text within them, so a rendering ends within a fraction of a second of its time limit. This module knows
nothing of messages or tokens.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

from ropewalk.text.budget import Metered, paid_argument, pay_for, spend
from ropewalk.text.payments import FILTERS, check_binop, check_method, paying_filter, paying_test

MAX_SOURCE_CHARACTERS = 131_072
_HANDED_ON = {
    "_loop_vars",
    "_block_vars",
}  # keyword arguments that Jinja adds to every call in a loop or block


class RaisedByTemplateError(Exception):
    """The template called `raise_exception`; the message is the template's own."""


def raise_exception(message: object) -> None:
    """What a template calls to refuse its messages."""
    raise RaisedByTemplateError(str(message))


def strftime_now(format: str) -> str:  # noqa: A002 (the name that templates use)
    """The local time, as `time.strftime` writes it."""
    return datetime.now().strftime(format)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, letters as they are."""
    if isinstance(indent, int) and indent > 16:
        raise SecurityError(f"tojson with an indent of {indent} is too wide")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts = []
    for part in encoder.iterencode(value):
        spend(0, len(part))
        parts.append(part)
    return "".join(parts)


class _Generation(Extension):
    """`{% generation %}` and `{% endgeneration %}` mark the assistant's words for training; here, nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Payments(NodeTransformer):
    """Adds payments to a parsed template where the environment would not see the work otherwise."""

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        length = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        if length:
            node.nodes.insert(0, _call("pay_for_template_text", nodes.Const(length), node))
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _call("metered", cast(nodes.Expr, node.iter), node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_call("copied", child, child) for child in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _paid(node.expr)
        for operand in node.ops:
            operand.expr = _paid(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _call("copied", node, node)
        node.arg = _paid(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.key = _paid(node.key)
        return node


def _call(name: str, argument: nodes.Expr, near: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=near.lineno)
    return nodes.Call(function, [argument], [], None, None, lineno=near.lineno)


def _paid(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("paid", node, node)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. Rendering takes place inside `budget.fresh_budget()`."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_pay_for_output,
            extensions=[_Generation, loopcontrols],
        )
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self.filters = {name: paying_filter(name, self.filters[name]) for name in FILTERS - {"tojson"}}
        self.filters["tojson"] = paying_filter("tojson", tojson)
        self.tests = {name: paying_test(name, cast(Any, test)) for name, test in self.tests.items()}

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        """Raise at once where Jinja gives an undefined value, which prints as nothing until it is used further."""
        raise SecurityError(f"reaches for {attribute!r} of a value of type {type(obj).__name__}")

    def compile_chat(self, source: str) -> Template:
        """Compile a template; raises jinja2.TemplateError, or whatever else a hostile source provokes."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise SecurityError(
                f"is {len(source)} characters long; at most {MAX_SOURCE_CHARACTERS} are allowed"
            )
        tree = _Payments().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    # What the compiled template calls, by way of `_Payments`.

    def pay_for_template_text(self, length: int) -> str:
        """Pay for the literal text of one piece of output."""
        spend(1, length)
        return ""

    def metered(self, iterable: Iterable[object]) -> Metered:
        """Pay for the turns of a loop."""
        return Metered(iterable)

    def paid(self, value: object) -> object:
        """Pay for reading a value."""
        pay_for(value)
        return value

    def copied(self, value: object) -> object:
        """Pay for a value that was copied, or is about to be."""
        pay_for(value, copied=True)
        return value

    # What Jinja's sandbox calls.

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something from a template: pay, and refuse methods that are not listed."""
        if getattr(__obj, "__self__", None) is __self:
            return __obj(*args)  # one of the payments above
        spend()
        if __obj is generate_lorem_ipsum:
            raise SecurityError("lipsum is not available in chat templates")
        if isinstance(__obj, LoopContext):  # a recursive loop goes one level down
            args = tuple(Metered(arg) if isinstance(arg, Iterable) else arg for arg in args)
        elif not isinstance(__obj, Macro):  # macros only pass their arguments on
            args = tuple(map(paid_argument, args))
            given = {name: paid_argument(kwargs[name]) for name in kwargs.keys() - _HANDED_ON}
            kwargs |= given
            method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped by the sandbox
            check_method(method, args, given)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, list)):
            pay_for(result, copied=True)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute left operator right, having paid for the result."""
        check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _pay_for_output(context: Context, value: object) -> object:
    """Pay for a value before it becomes text. Asking for the context keeps Jinja from computing it early."""
    pay_for(value, copied=True)
    return value

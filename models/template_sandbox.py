"""A sandbox for chat templates of strangers: bounded in time and memory, in this process.

Jinja's own sandbox keeps a template from attributes, modules and files, but not from filling the
memory or never ending. Here everything a template does is paid from one allowance, in bytes: a step
costs `_STEP`, and what is made or looked through costs its size, before it is made where it may be
larger than what it is made of. So time and memory both end with the allowance.

It holds because nothing is allowed that was not thought of: statements, filters, tests, functions
and methods are lists below, and whatever they do natively to a value is paid for first. A child
process with limits would hold without such lists. It would take 20 MiB more on a small device,
and macOS does not enforce its limit of memory.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from json import dumps
from string import Formatter
from types import BuiltinMethodType, CodeType
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from edgespec.models.control_texts import NO_CONTROLS, ControlTexts

_STEP = 150  # bytes that a step costs; it takes about a microsecond
_FILTER = 3 * _STEP
_BASE = 50_000_000  # bytes of every rendering
_PER_BYTE = 20  # more for each byte of the conversation
_NODE = 64  # bytes of a value beside its text
_PLACE = 8  # bytes of a place in a list
_LARGEST_INT_BITS = 4096
_LARGEST_WIDTH = 1000  # of a column, an indent, a precision
_MAX_DEPTH = 30  # of blocks in blocks; Python itself has loops in 20 loops
_MAX_TOKENS = 20_000  # of a template's source; the longest of 1,035 real ones has 5,160
_COMPILED = 4  # templates that are kept compiled


class ExhaustedError(Exception):
    """A template took more than its allowance."""


def render(
    source: str,
    variables: Mapping[str, Any],
    functions: Mapping[str, Any],
    controls: ControlTexts = NO_CONTROLS,
) -> str:
    """The text of a template.

    Args:
        source: Jinja source.
        variables: plain data: texts, numbers, lists and dictionaries.
        functions: what the template may call by name, as `raise_exception`.
        controls: what must not come about where a template takes something out of a text.

    Raises ExhaustedError for one without an end, and whatever else Jinja raises.
    """
    environment = _Environment()
    environment.controls = controls
    environment.left = sys.maxsize
    environment.left = _BASE + _PER_BYTE * environment.size(variables)
    environment.globals.update(functions)
    environment.functions = frozenset({*environment.functions, *functions.values()})
    template = Template.from_code(environment, _compiled(source), dict(environment.globals))
    pieces = []
    for piece in template.generate(variables):
        environment.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


@functools.lru_cache(_COMPILED)
def _compiled(source: str) -> CodeType:
    return _Environment().compile(source)


class _Space(Namespace):
    """A template's `namespace`, which is a word where it is printed."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Lazy:
    """What a filter such as `map` made: as a generator it is true, and has no length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __repr__(self) -> str:
        return "<generator>"


class _Generation(Extension):
    """`{% generation %}`, with which templates mark answers for training: what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        made = nodes.Scope(body)
        made.lineno = line
        return made


# -- source --------------------------------------------------------------------------------

_ALLOWED: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro),
    *(
        nodes.CallBlock,
        nodes.FilterBlock,
        nodes.With,
        nodes.ExprStmt,
        nodes.Assign,
        nodes.AssignBlock,
        nodes.Scope,
    ),
    *(nodes.Continue, nodes.Break, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List),
    *(nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand),
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.EnvironmentAttribute),
)
_LOOPS = (nodes.For, nodes.If, nodes.With, nodes.Scope)
_BLOCKS = (*_LOOPS, nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock)


class _Rewriter(NodeTransformer):
    """Turns what Jinja would do natively into calls of the environment, which are paid for."""

    _depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(node, _ALLOWED):
            name = type(node).__name__.lower()
            raise TemplateAssertionError(f"{name} is nothing for chat templates", node.lineno)
        self._depth += (is_block := isinstance(node, _BLOCKS))
        if self._depth > _MAX_DEPTH:  # Jinja's own time grows with its square
            raise ExhaustedError(f"it has blocks in more than {_MAX_DEPTH} blocks")
        made = super().visit(node, *args, **kwargs)
        self._depth -= is_block
        return made

    def visit_For(self, node: nodes.For) -> nodes.For:
        node.body.insert(0, _placed(nodes.ExprStmt(_tick(node, node.body)), node))
        if node.test is not None:  # items that it leaves out are turns as well
            node.test = _placed(nodes.And(_tick(node, ()), node.test), node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        node.body.insert(0, _placed(nodes.ExprStmt(_tick(node, node.body)), node))
        return self.generic_visit(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        node.body.insert(0, _placed(nodes.ExprStmt(_tick(node, node.body)), node))
        self.generic_visit(node.call)  # which has to stay a call
        node.defaults = [self.visit(one) for one in node.defaults]
        node.body = [self.visit(one) for one in node.body]
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> Any:
        if node.filter is None:
            return self.generic_visit(node)
        made = _placed(nodes.AssignBlock(node.target, None, node.body), node)
        written = self._filtered(node.filter, node.target)
        return [self.visit(made), _placed(nodes.Assign(node.target, written), node)]

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:
        name = nodes.Name("filtered", "store")
        made = _placed(nodes.AssignBlock(name, None, node.body), node)
        written = _placed(nodes.Output([self._filtered(node.filter, name)]), node)
        return _placed(nodes.Scope([self.visit(made), written]), node)  # type: ignore[no-any-return]

    def _filtered(self, outer: nodes.Filter, target: nodes.Node) -> nodes.Expr:
        """The filters of a block, applied to a name that has its text."""
        if not isinstance(target, nodes.Name):
            raise TemplateAssertionError("a filtered block needs a name", outer.lineno)
        inner = outer
        while isinstance(inner.node, nodes.Filter):
            inner = inner.node
        inner.node = _placed(nodes.Name(target.name, "load"), outer)
        return self.visit(outer)  # type: ignore[no-any-return]

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateAssertionError("names of a namespace begin with a letter", node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return self._call(node, "join_texts", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        rest = [part for one in node.ops for part in (nodes.Const(one.op), one.expr)]
        return self._call(node, "compare", node.expr, *rest)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        keys_and_values = [part for pair in node.items for part in (pair.key, pair.value)]
        return self._call(node, "make_dict", *keys_and_values)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._call(node, "make_list", *node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":
            return node
        return self._call(node, "make_tuple", *node.items)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        cut = node.arg
        if not isinstance(cut, nodes.Slice):
            return self.generic_visit(node)
        parts = [part or nodes.Const(None) for part in (cut.start, cut.stop, cut.step)]
        return self._call(node, "cut", node.node, *parts)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._named(node, "apply_filter")

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._named(node, "apply_test")

    def _named(self, node: nodes.Filter | nodes.Test, method: str) -> nodes.Node:
        assert node.node is not None
        call = nodes.Call(
            nodes.EnvironmentAttribute(method),
            [nodes.Const(node.name), node.node, *node.args],
            node.kwargs,
            node.dyn_args,
            node.dyn_kwargs,
        )
        return self.generic_visit(_placed(call, node))

    def _call(self, node: nodes.Node, method: str, *parts: nodes.Expr) -> nodes.Node:
        call = nodes.Call(nodes.EnvironmentAttribute(method), list(parts), [], None, None)
        return self.generic_visit(_placed(call, node))


def _tick(node: nodes.Node, body: Iterable[nodes.Node]) -> nodes.Call:
    """A call that pays for a turn, and for the texts that the template itself writes in it."""
    data = (found for one in body for found in one.find_all(nodes.TemplateData))
    size = nodes.Const(sum(len(one.data) for one in data))
    return _placed(nodes.Call(nodes.EnvironmentAttribute("tick"), [size], [], None, None), node)  # type: ignore[no-any-return]


def _placed(made: Any, node: nodes.Node) -> Any:
    """A new node at the line of another. `set_lineno` would visit all that is in it."""
    made.lineno = node.lineno
    return made


# -- the environment -----------------------------------------------------------------------

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_COMPARING_TESTS = {
    **{"equalto": "eq", "==": "eq", "eq": "eq", "!=": "ne", "ne": "ne", "in": "in"},
    **{">": "gt", "gt": "gt", "greaterthan": "gt", ">=": "gteq", "ge": "gteq"},
    **{"<": "lt", "lt": "lt", "lessthan": "lt", "<=": "lteq", "le": "lteq"},
}
_TESTS = frozenset(
    "boolean callable defined divisibleby even false float integer iterable lower mapping none "
    "number odd sameas sequence string true undefined upper".split()
)
# Filters of Jinja: those that hand out what is there, that copy places, that look at all of it.
_AT_ONCE = frozenset("count d default first last length".split())
_SHALLOW = frozenset("items list reverse".split())
_QUICK = frozenset("capitalize lower string trim upper".split())
_DEEP = frozenset(
    "abs batch capitalize center dictsort float groupby indent int join lower map max min reject "
    "rejectattr replace round select selectattr slice sort string sum title trim truncate unique "
    "upper urlencode wordcount".split()
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format index isalnum isalpha isascii "
        "isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip "
        "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip "
        "split splitlines startswith strip swapcase title upper zfill".split()
    ),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
_SCALARS = (str, int, float, bool, type(None))
_VIEWS: tuple[type, ...] = (type({}.items()), type({}.keys()), type({}.values()))
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")


class _Environment(ImmutableSandboxedEnvironment):
    """Where one rendering happens; `left` is what remains of its allowance."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.left = _BASE
        self.controls = NO_CONTROLS
        self.finalize = self.text
        self.globals = {"range": self.make_range, "dict": self.dict_of, "namespace": _Space}
        self.functions = frozenset(self.globals.values())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        for count, _ in enumerate(self.lexer.tokenize(source)):
            if count > _MAX_TOKENS:
                raise ExhaustedError(f"it has more than {_MAX_TOKENS} words")
        tree: nodes.Template = _Rewriter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    # -- what is paid ----------------------------------------------------------------------

    def spend(self, num_bytes: int) -> None:
        """Pay. Raises ExhaustedError when nothing is left."""
        self.left -= num_bytes
        if self.left < 0:
            raise ExhaustedError("it takes too long or too much memory")

    def size(self, value: Any) -> int:
        """Bytes of a value with all that is in it, as often as it is in it.

        Raises ExhaustedError where that is more than what is left: a list can hold another twice,
        which holds another twice, and so on.
        """
        if type(value) is str:
            return len(value) if value.isascii() else 4 * len(value)
        total, todo = 0, [iter((value,))]
        while todo:
            for one in todo[-1]:
                kind = type(one)
                total += _NODE
                if total > self.left:
                    self.spend(total)
                if kind is str:
                    total += len(one) if one.isascii() else 4 * len(one)
                elif kind is dict:
                    todo += (iter(one.keys()), iter(one.values()))
                    break
                elif kind in (list, tuple, _Lazy) or kind in _VIEWS:
                    todo.append(iter(one))
                    break
                elif kind is int:
                    total += one.bit_length() >> 3
                elif kind is range:
                    total += _NODE * len(one)
            else:
                todo.pop()
        return total

    def length(self, value: Any) -> int:
        """Bytes of a value, without those of what is in it."""
        if type(value) is str:
            return len(value) if value.isascii() else 4 * len(value)
        if isinstance(value, _Lazy):
            return _PLACE * len(value.items)
        return _PLACE * len(value) if hasattr(value, "__len__") else _NODE

    def text(self, value: Any) -> str:
        """What is printed of a value."""
        if type(value) is not str:
            self.spend(2 * self.size(value))
            value = str(value)
        self.spend(len(value) if value.isascii() else 4 * len(value))
        return value  # type: ignore[no-any-return]

    # -- what the rewritten source calls -----------------------------------------------------

    def tick(self, _context: Context, size: int) -> bool:
        self.spend(_STEP + size)
        return True

    def join_texts(self, _context: Context, *values: Any) -> str:
        made = "".join([self.text(value) for value in values])
        self.spend(_STEP + self.length(made))
        return made

    def compare(self, _context: Context, left: Any, *rest: Any) -> Any:
        result: Any = True
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            self._pay_comparison(name, left, right)
            result = _COMPARISONS[name](left, right)
            if not result:
                return result
            left = right
        return result

    def _pay_comparison(self, name: str, left: Any, right: Any) -> None:
        self.spend(_STEP)
        if type(left) is str and type(right) is str:
            self.spend((len(left) + len(right)) >> 4)
        elif name in ("in", "notin"):
            if type(left) in (str, int, bool, type(None)) and type(right) is dict:
                return
            self.spend(self.size(right) + self.size(left) * (1 + self.length(right) // 64))
        elif type(left) not in _SCALARS and type(right) not in _SCALARS:
            self.spend(self.size(left) + self.size(right))

    def make_list(self, _context: Context, *items: Any) -> list[Any]:
        self.spend(_STEP + _NODE * len(items))
        return list(items)

    def make_tuple(self, _context: Context, *items: Any) -> tuple[Any, ...]:
        self.spend(_STEP + _NODE * len(items))
        return items

    def make_dict(self, _context: Context, *parts: Any) -> dict[Any, Any]:
        keys, values = parts[::2], parts[1::2]
        self.spend(_STEP + 4 * _NODE * len(keys) + sum(map(self.size, keys)))
        return dict(zip(keys, values, strict=True))

    def dict_of(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        self.spend(4 * self.size([args, kwargs]))
        return dict(*args, **kwargs)

    def make_range(self, *args: int) -> range:
        made = range(*args)
        if len(made) > 100_000:
            raise ExhaustedError(f"it counts to {len(made)}")
        return made

    def cut(self, _context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            return self.undefined(obj=value, name="slice")
        made = value[start:stop:step]
        self.spend(_STEP + self.length(made))
        return made

    # -- what Jinja calls ------------------------------------------------------------------

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.spend(_STEP)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.spend(_STEP)
        if type(argument) not in _SCALARS:
            return self.undefined(obj=obj, name=type(argument).__name__)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # `call` has its own

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.spend(_STEP)
        if isinstance(left, int | float) and isinstance(right, int | float):
            self._check_numbers(operator, left, right)
        elif operator == "+":
            self.spend(self.length(left) + self.length(right))
        elif operator == "*":
            count = left if isinstance(left, int) else right
            many = right if isinstance(left, int) else left
            if isinstance(count, int) and isinstance(many, str | list | tuple):
                self.spend(max(0, count) * self.length(many))
        elif isinstance(left, _VIEWS):
            raise TypeError("a view of a dictionary has no operators")
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise ExhaustedError("it asks for a wide column")
            self.spend(len(left) + left.count("%") * 2 * self.size(right))
        return super().call_binop(context, operator, left, right)

    def _check_numbers(self, operator: str, left: float, right: float) -> None:
        bits = [one.bit_length() if isinstance(one, int) else 0 for one in (left, right)]
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            bits.append(bits[0] * abs(right))
        if operator == "*":
            bits.append(sum(bits))
        if max(bits) > _LARGEST_INT_BITS:
            raise ExhaustedError("it computes a huge number")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_loop_vars", None)  # which Jinja adds for functions that ask for them
        kwargs.pop("_block_vars", None)
        owner = getattr(function, "__self__", None)
        if owner is self and function not in self.functions:  # by the rewritten source
            return function(context, *args, **kwargs)
        self.spend(_STEP)
        if isinstance(function, BuiltinMethodType):
            return self._method(owner, function, args, kwargs)
        if isinstance(function, Macro):
            made = function(*args, **kwargs)
            self.spend(self.length(made))
            return made
        if isinstance(owner, LoopContext) and function.__name__ in ("changed", "cycle"):
            self.spend(self.size(args))
            return function(*args)
        allowed = isinstance(function, Undefined | LoopContext) or function in self.functions
        if not allowed:
            raise SecurityError("it calls what is no function of chat templates")
        self.spend(8 * sum(map(self.length, args)))
        return function(*args, **kwargs)

    def _method(self, owner: Any, function: Any, args: Any, kwargs: Any) -> Any:
        name = function.__name__
        if name not in _METHODS.get(type(owner), ()):
            raise SecurityError(f"{type(owner).__name__}.{name} is nothing for chat templates")
        if type(owner) is str:
            made = self._text_method(owner, name, args, kwargs)
        elif name in ("count", "index"):
            self.spend(self.size(owner) + self.size(args) * (1 + len(owner)))
            made = function(*args)
        else:
            made = function(*args, **kwargs)
        if type(owner) is str or name == "copy":
            self.spend(self.size(made) if type(owner) is str else self.length(made))
        return made

    def _text_method(self, owner: str, name: str, args: Any, kwargs: Any) -> Any:
        self.spend(self.length(owner) + self.size(args))
        if name == "join":
            return self.join(owner, *args, **kwargs)
        if name == "format":
            return self._format(owner, args, kwargs)
        if name == "replace":
            return self.replace(owner, *args, **kwargs)
        if name in ("center", "ljust", "rjust", "zfill"):
            self._check_width(args[:1])
        if name in ("rfind", "rindex", "rpartition", "rsplit") and args:
            self.spend(self.length(owner) * self.length(args[0]) >> 4)  # which searches naively
        return getattr(owner, name)(*args, **kwargs)

    def _format(self, owner: str, args: Any, kwargs: Any) -> str:
        fields = 0
        for _, field, spec, _ in Formatter().parse(owner):
            fields += 1
            if field is not None and re.search(r"[.\[]", field):
                raise SecurityError("a format that looks into values is nothing for templates")
            if spec and re.search(r"\d{4}|\{", spec):
                raise ExhaustedError("it asks for a wide column")
        self.spend(2 * fields * self.size([args, kwargs]))
        return owner.format(*args, **kwargs)

    def _check_width(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > _LARGEST_WIDTH:
                raise ExhaustedError(f"it asks for a column of {value}")
            self.spend(self.length(value) if isinstance(value, str) else _STEP)

    # -- filters and tests -----------------------------------------------------------------

    def join(self, separator: Any, values: Any) -> str:
        texts = [self.text(value) for value in values]
        self.spend(len(texts) * (_NODE + self.length(separator)))
        return self.text(separator).join(texts)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        self.spend(text.count(old) * self.length(new))
        made = text.replace(old, new, count)
        if made == text or not self.controls.count(made):
            return made
        before = self.controls.count(text) + text.count(old) * self.controls.count(new)
        # "<|im_</think>end|>" without "</think>"
        return made if self.controls.count(made) <= before else str(self.controls.mark(made))

    def apply_test(self, context: Context, name: str, value: Any, *args: Any, **kw: Any) -> Any:
        return self.call_test(name, value, args, kw)

    def call_test(
        self, name: str, value: Any, args: Any = None, kwargs: Any = None, *_: Any, **__: Any
    ) -> Any:
        args, kwargs = args or (), kwargs or {}
        self.spend(_STEP)
        if name in _COMPARING_TESTS:
            (other,) = args
            self._pay_comparison(_COMPARING_TESTS[name], value, other)
            return _COMPARISONS[_COMPARING_TESTS[name]](value, other)
        if name not in _TESTS:
            raise TemplateAssertionError(f"there is no test {name!r}", 1)
        if name in ("lower", "upper"):
            self.spend(self.size(value))
        test: Any = TESTS[name]
        return test(value, *args, **kwargs)

    def apply_filter(self, context: Context, name: str, value: Any, *args: Any, **kw: Any) -> Any:
        return self.call_filter(name, value, args, kw, context=context)

    def call_filter(  # type: ignore[override]
        self, name: str, value: Any, args: Any = None, kwargs: Any = None, **more: Any
    ) -> Any:
        args, kwargs = args or (), kwargs or {}
        self.spend(_FILTER + self.size(args) + self.size(kwargs))
        if name in _OWN:
            made = getattr(self, f"filter_{name}")(value, *args, **kwargs)
        elif name in _AT_ONCE:
            return super().call_filter(name, value, args, kwargs, **more)
        elif name in _SHALLOW or name in _DEEP:
            size = self.size(value) if name in _DEEP or isinstance(value, str) else None
            weight = 1 if name in _QUICK else 4
            self.spend(self.length(value) if size is None else weight * size)
            self._check_filter(name, value, args, kwargs)
            made = super().call_filter(name, value, args, kwargs, **more)
        else:
            raise TemplateAssertionError(f"there is no filter {name!r}", 1)
        if isinstance(made, Iterator):
            made = _Lazy(self._taken(made))
        is_cut = isinstance(value, str) and isinstance(made, list | _Lazy)  # into new texts
        self.spend(8 * self.length(made) if is_cut else self.length(made))
        return made

    def _taken(self, items: Iterator[Any]) -> list[Any]:
        taken = []
        for item in items:
            self.spend(_PLACE + (self.length(item) if isinstance(item, list) else 0))
            taken.append(item)
        return taken

    def _check_filter(self, name: str, value: Any, args: Any, kwargs: Any) -> None:
        """Refuse what makes more of a value than it is."""
        if name in ("batch", "center", "indent", "round", "slice", "truncate"):
            given = [*args, *kwargs.values()]
            self._check_width(given)
            width = max([1, *(self.size(one) for one in given if not isinstance(one, int))])
            width = max([width, *(one for one in given if isinstance(one, int))])
            lines = value.count("\n") + 1 if isinstance(value, str) else 1
            self.spend(lines * width * (4 if name == "indent" else _NODE))
        elif name == "int" and isinstance(value, str) and len(value) > _LARGEST_WIDTH:
            raise ExhaustedError("it reads a huge number")
        elif name == "sum" and (len(args) > 1 or "start" in kwargs):  # it would add up lists
            raise TypeError("sum is for numbers")

    def filter_escape(self, value: Any) -> str:
        self.spend(6 * self.size(value))
        return escape(self.text(value))

    filter_e = filter_forceescape = filter_escape

    def filter_format(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_binop(None, "%", self.text(value), kwargs or args)

    def filter_join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = [self.getitem(one, attribute) for one in value]
        return self.join(d, value)

    def filter_replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text = self.text(value)
        return self.replace(text, str(old), str(new), -1 if count is None else count)

    def filter_string(self, value: Any) -> str:
        return self.text(value)

    filter_pprint = filter_safe = filter_string

    def filter_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter of transformers' chat templates: Jinja's own escapes for HTML."""
        self._check_width([indent, *(separators or ())])
        width = indent if isinstance(indent, int) else len(indent or "")
        size = self.size(value)
        self.spend((4 + 6 * bool(ensure_ascii)) * size + size // _NODE * width)
        return dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )


_OWN = frozenset(
    name.removeprefix("filter_") for name in vars(_Environment) if name.startswith("filter_")
)
assert _AT_ONCE | _SHALLOW | _DEEP <= FILTERS.keys() and _TESTS <= TESTS.keys()

"""Where a mistake can be planted: the points of a Python file and of a Lua script.

A point replaces a few bytes of the source and leaves the rest as it is. What cannot change behaviour, or changes only
what no test should assert, is no point: docstrings, annotations, type aliases, log calls, messages, assertions,
`TYPE_CHECKING`, `__all__`, `if __name__`, and numbers that are durations or buffer sizes.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

PAIRS = "< <=, > >=, == !=, is|is not, in|not in, + -, and or, min max, minimum maximum"
SWAP = dict(pair.split("|" if "|" in pair else None) for pair in PAIRS.split(", "))
SWAP |= {new: old for old, new in SWAP.items()} | {"*": "/", "/": "*", "//": "*"}
LUA_SWAP = SWAP | {"==": "~=", "~=": "==", "true": "false", "false": "true", "not ": ""}
LUA_NAMES = {"and": "logic", "or": "logic", "not ": "drop not", "true": "constant", "false": "constant"}
LUA_NAMES |= dict.fromkeys("+-*/", "arithmetic")
LUA_TOKEN = re.compile(r"<=|>=|==|~=|<|>|\b(?:and|or|true|false|not |\d+\b(?!\.\d))|(?<=[\w)] )[-+*/](?= )")
LUA_HIDDEN = re.compile(r"""--[^\n]*|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*\"""")
LUA_CALL = re.compile(r"(?:^|\b(?:then|do|else) )\s*([\w.]+\(.*\))(?: end)?\s*$")
LUA_CONTINUES = re.compile(r"(?:[-+*/=,(<>]|\.\.|\b(?:and|or|not|return))\s*$")
LUA_CONTINUED = re.compile(r"\s*(?:[-+*/=,)<>]|\.\.|(?:and|or)\b)")

LOG_CALLS = {"debug", "info", "warning", "warn", "error", "exception", "critical"}
QUIET_KEYWORDS = {"strict", "daemon", "description", "title", "examples", "help", "flush"}
DURATIONS = re.compile(r"(?i)(^|_)(s|ms|seconds|timeout|interval|bytes|chunk|backlog)$")  # 30 or 31: the same behaviour
TYPE_NAME = re.compile(r"[A-Z][a-z]\w*$")
NO_CODE = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)

Edit = tuple[str, int, int, str]
"""Operator, start, end, text; see `Point`."""


@dataclass(frozen=True)
class Point:
    """One possible mistake: the bytes from `start` to `end` of the file become `text`."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    lines: tuple[int, int]
    """First and last line of its statement, or of the statement's header."""
    in_function: bool
    """Other code runs once, in whichever test imports the module first."""

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line}:{self.start}:{self.end}:{self.text}"

    def plant(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def show(self, source: bytes) -> tuple[str, str]:
        """The changed lines before and after, each as one line."""
        first = source.rfind(b"\n", 0, self.start) + 1
        rest = len((source[self.end :] + b"\n").split(b"\n", 1)[1])
        texts = (source + b"\n", self.plant(source + b"\n"))
        before, after = (b" ".join(text[first : len(text) - rest].split()).decode() for text in texts)
        return before, after


def points_of(path: str, source: bytes) -> list[Point]:
    """All points of a file, Python or Lua by its name."""
    return [*(lua_points(path, source) if path.endswith(".lua") else PythonFile(path, source).points())]


class PythonFile:
    """Finds the points of one Python file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source
        self._starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def points(self) -> Iterator[Point]:
        for point in self._walk(ast.parse(self._source), (1, 1), inside=False, quiet=False):
            with contextlib.suppress(SyntaxError):
                compile(point.plant(self._source), self._path, "exec", dont_inherit=True)
                yield point

    def _walk(self, node: ast.AST, lines: tuple[int, int], *, inside: bool, quiet: bool) -> Iterator[Point]:
        if isinstance(node, NO_CODE) or _is_quiet(node, inside):
            return
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0)
        for operator, start, end, text in itertools.chain(self._statement(node), self._expression(node, quiet)):
            line = self._source.count(b"\n", 0, start) + 1
            yield Point(self._path, line, operator, start, end, text, lines, inside)
        for child, name, inner in _children(node):
            quiet_child = quiet or bool(DURATIONS.search(name))
            yield from self._walk(child, lines, inside=inside or inner, quiet=quiet_child)

    def _statement(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                if not _is_quiet(node.value, True):
                    yield self._edit("drop statement", node, "pass")
            case ast.Assign(targets=[target, *_]) | ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                if isinstance(target, ast.Attribute | ast.Subscript) and node.value is not None:
                    yield self._edit("drop statement", node, "pass")
            case ast.Return(value=ast.expr() as value):
                if not (isinstance(value, ast.Constant) and not value.value):
                    yield self._edit("return None", node, "return None")
            case ast.Raise():
                if not any(isinstance(part, ast.Await) for part in ast.walk(node)):
                    yield self._edit("drop raise", node, "pass")
            case ast.Break():
                yield self._edit("break", node, "continue")

    def _expression(self, node: ast.AST, quiet: bool) -> Iterator[Edit]:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from self._negate([test])
            case ast.comprehension(ifs=tests):
                yield from self._negate(tests)
            case ast.UnaryOp(op=ast.Not()):
                yield self._edit("drop not", node, self._text(node.operand))
            case ast.Compare() | ast.BoolOp() | ast.BinOp() | ast.AugAssign():
                yield from self._swap(node)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr="minimum" | "maximum" as name)) if name in SWAP:
                end = self._span(node.func)[1]
                yield "min/max", end - len(name), end, SWAP[name]
            case ast.Slice():
                bounds = [bound for bound in (node.lower, node.upper) if bound and not isinstance(bound, ast.Constant)]
                yield from (self._edit("slice", bound, f"({self._text(bound)}) + 1") for bound in bounds)
            case ast.Constant(value=bool() as value):
                yield self._edit("constant", node, str(not value))
            case ast.Constant(value=int() | float() as value) if not quiet:
                yield self._edit("constant", node, repr(value + 1))

    def _negate(self, tests: list[ast.expr]) -> Iterator[Edit]:
        for test in tests:
            if not isinstance(test, ast.Constant | ast.UnaryOp):
                yield self._edit("negate condition", test, f"not ({self._text(test)})")

    def _swap(self, node: ast.Compare | ast.BoolOp | ast.BinOp | ast.AugAssign) -> Iterator[Edit]:
        """Replace an operator between two expressions, where nothing but brackets stands beside it."""
        match node:
            case ast.Compare():
                name, values = "compare", [node.left, *node.comparators]
            case ast.BoolOp():
                name, values = "logic", node.values
            case ast.BinOp():
                name, values = "arithmetic", [node.left, node.right]
            case _:
                name, values = "arithmetic", [node.target, node.value]
        for left, right in itertools.pairwise(values):
            start, end = self._span(left)[1], self._span(right)[0]
            gap = self._source[start:end].decode()
            found = re.fullmatch(r"([\s)\\]*)(is not|not in|[^\s()\\]+?)(=?)[\s(\\]*", gap)
            if found is None or _is_text(left) or _is_text(right):
                continue
            new = SWAP.get(found[2] + found[3]) or SWAP.get(found[2], "") + found[3]
            if new.strip("="):
                yield name, start + found.start(2), start + found.end(3), new

    def _edit(self, operator: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        return operator, *self._span(node), text

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end_column

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_quiet(node: ast.AST, inside: bool) -> bool:
    """Whether the node holds nothing that a test should assert."""
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
            return True
        case ast.Assign(targets=[ast.Name(name)]) if not inside:
            return name == "__all__" or bool(TYPE_NAME.match(name))
        case ast.Call(func=ast.Attribute(value=base, attr=name)) if name in LOG_CALLS:
            return re.search("log|warnings", ast.unparse(base).lower()) is not None
        case ast.FunctionDef(decorator_list=[first, *_]) | ast.AsyncFunctionDef(decorator_list=[first, *_]):
            return "overload" in ast.unparse(first)
    return type(node).__name__ == "TypeAlias"


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str, bool]]:
    """The parts that hold code, the name of what each gives a value to, and whether a call runs it, not the import."""
    match node:
        case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
            named = [*args.posonlyargs, *args.args][::-1]
            defaults = [
                *zip(named, args.defaults[::-1], strict=False),
                *zip(args.kwonlyargs, args.kw_defaults, strict=True),
            ]
            yield from ((value, arg.arg, False) for arg, value in defaults if value is not None)
            yield from ((child, "", True) for child in node.body)
        case ast.ClassDef():
            yield from ((child, "", False) for child in node.body)
        case ast.AnnAssign(value=None) | ast.Raise():
            return
        case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)) if len(names) == len(values):
            yield from ((name, "", False) for name in names)
            yield from ((value, ast.unparse(name), False) for name, value in zip(names, values, strict=True))
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
            yield from ((child, ast.unparse(target), False) for child in (target, node.value) if child)
        case ast.keyword():
            if node.arg not in QUIET_KEYWORDS:
                yield node.value, node.arg or "", False
        case _:
            yield from ((child, "", False) for child in ast.iter_child_nodes(node))


def lua_points(path: str, source: bytes) -> Iterator[Point]:
    """Tokens and calls that stand as statements; strings and comments are blanked first."""
    code = LUA_HIDDEN.sub(lambda found: " " * len(found[0]), source.decode("latin-1"))
    start, previous = 0, ""
    lines = code.split("\n")
    for number, line in enumerate(lines, 1):
        for operator, first, last, new in _lua_edits(line, previous, lines[number] if number < len(lines) else ""):
            yield Point(path, number, operator, start + first, start + last, new, (number, number), True)
        previous = line if line.strip() else previous
        start += len(line) + 1


def _lua_edits(line: str, previous: str, following: str) -> Iterator[Edit]:
    for token in LUA_TOKEN.finditer(line):
        new = str(int(token[0]) + 1) if token[0].isdigit() else LUA_SWAP[token[0]]
        name = LUA_NAMES.get(token[0], "constant" if token[0].isdigit() else "compare")
        yield name, *token.span(), new
    call = LUA_CALL.search(line)
    whole = not LUA_CONTINUES.search(previous) and not LUA_CONTINUED.match(following)
    if call and whole and call[1].count("(") == call[1].count(")"):
        yield "drop statement", *call.span(1), ""


def function_lines(source: bytes) -> set[int]:
    """Lines inside functions, which a call executes and not the import."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}

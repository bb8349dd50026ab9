"""Analyse test code without running it: what runs, how many checks it executes, and what it imports.

Test code is plain asserts, pytest functions, unittest classes, or HumanEval's `check(candidate)`. Code that would pass
every program, because it checks nothing, is refused.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from types import CodeType

from rlhfless.rewards.protocol import Unscorable

PROGRAM_MODULES = ("solution", "__main__")
"""Names under which test code may import the response's program."""

COUNTER = "_rlhfless_count"
"""Function that instrumented test code calls before each check, so that a caught assert counts as failed."""

EQUAL = "_rlhfless_equal"
"""Function that instrumented test code calls for `==`."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_EXITS = frozenset({"exit", "quit", "_exit", "fail"})
_CONTEXTS = frozenset({"raises", "warns", "assertRaises", "assertRaisesRegex", "assertWarns", "assertLogs"})
_FILLING = frozenset({"patch", "given"})
"""Decorators that pass arguments to a test (unittest.mock, hypothesis)."""
_BY_NAME = frozenset({"eval", "exec", "globals", "locals", "vars", "__import__", "import_module"})


@dataclass(frozen=True, slots=True)
class TestCode:
    """Runnable test code; pytest and unittest tests are listed by name, because they must be called."""

    __test__ = False  # not a test of pytest

    code: CodeType
    """The code, instrumented with COUNTER and EQUAL."""
    functions: tuple[str, ...]
    classes: tuple[str, ...]
    check: bool
    """Whether it defines `check(candidate)` without calling it."""
    candidate: bool
    """Whether it needs the function under test as `candidate`."""
    imports: tuple[str, ...]
    """Imported modules, except the program."""
    uses: frozenset[str]
    """Names of the program that it uses."""


@lru_cache(maxsize=512)
def read_test_code(source: str) -> TestCode:
    """Analyse and instrument test code. Raises Unscorable if it is not Python, or checks nothing."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
            compile(source, "<tests>", "exec", dont_inherit=True)  # finds what the grammar does not
    except SyntaxError as error:
        raise Unscorable(f"the test code is not Python: line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unscorable(f"the test code is not Python: {error or 'it is nested too deeply'}") from error
    tree.body = list(_without_runners(tree.body))
    if not tree.body:
        raise Unscorable("the test code has no statement: there is nothing to run; remove the row, or fill it in")
    reader = _Reader(source, tree)
    reader.require_checks()
    reader.require_program()
    ast.fix_missing_locations(_Counting().visit(tree))
    with warnings.catch_warnings(action="ignore"):
        code = compile(tree, "<tests>", "exec", dont_inherit=True)
    functions, classes = (tuple(node.name for node in nodes) for nodes in (reader.functions, reader.classes))
    return TestCode(code, functions, classes, reader.check, reader.candidate, tuple(reader.imports), reader.uses)


class _Reader:
    """What test code defines, and which of it runs."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        self._tree = tree
        top = [node for node in tree.body if isinstance(node, _Scope)]
        self._cases = _test_cases(top)
        fixtures = _fixtures(top)
        self.functions: list[_Function] = []
        self.classes: list[ast.ClassDef] = []
        self.check = False
        namings = Counter(name for each in top for name in _names(ast.walk(each)))
        called = _names(_walk(tree.body))
        for node in [node for node in top if "fixture" not in _decorators(node)]:
            own = node.name in _names(ast.walk(node))
            if not _skipped(node):
                self._collect(node, named=node.name in called or namings[node.name] > own)
        for function in self.functions:
            _require_fixtures(function, _required(function), function.decorator_list, fixtures)
        for node in self.classes:
            tests = [each for each in _methods(node) if each.name.startswith("test") and not _skipped(each)]
            for method in tests if node.name not in self._cases else ():
                decorators = [*method.decorator_list, *node.decorator_list]
                _require_fixtures(method, _required(method)[1:], decorators, fixtures)
        self.imports = list(self._imports())
        self._free = _free_names(source)
        self.candidate = self.check or "candidate" in self._free
        self.uses = frozenset(self._free | _from_program(tree)) - {"candidate"}

    def _collect(self, node: _Function | ast.ClassDef, *, named: bool) -> None:
        """Register a definition as a test if it is one. `named`: other code refers to it."""
        if isinstance(node, ast.ClassDef):
            if node.name in self._cases or node.name.startswith("Test"):
                self.classes.append(node)
        elif named and _required(node):
            return  # a helper of tests
        elif node.name == "check" and len(_required(node)) == 1:
            self.check = True
        elif node.name.startswith("test"):
            self.functions.append(node)

    def require_checks(self) -> None:
        """Raises Unscorable if no check is reachable, or a reachable assert can never fail."""
        if sum(map(_is_check, self._reached())):
            return
        statements = [node for node in ast.walk(self._tree) if isinstance(node, ast.stmt)]
        if unreached := [node for node in statements if _is_check(node)]:
            what = f"its check in line {unreached[0].lineno} is in a function or class that nothing calls"
            hint = "call it, or name it `test_...`"
        elif any(isinstance(node, ast.Assert) for node in statements):
            what, hint = "what it asserts is constant", "assert what the program returns"
        else:
            what, hint = "it has no assert, so every program would pass", "add one"
        raise Unscorable(f"the test code checks nothing: {what}; {hint}")

    def require_program(self) -> None:
        """Raises Unscorable if the code never uses the program, or imports a module that is not installed."""
        for name in self.imports:
            if not _installed(name):
                hint = "install it, or import `solution` if it is the response's program"
                raise Unscorable(f"the test code imports `{name}`, which is not installed; {hint}")
        if self.candidate:
            return
        nodes = list(ast.walk(self._tree))
        imported = any(module.split(".")[0] in PROGRAM_MODULES for module in _imported(nodes))
        stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
        if not imported and not stars and not self._free and not _names(nodes) & _BY_NAME:
            what = "the test code uses nothing of the response's program, so every program would pass"
            raise Unscorable(f"{what}; call its function, or import `solution`")

    def _reached(self) -> list[ast.stmt]:
        """Return the statements that run: module level, tests, and what these refer to."""
        defined: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, _Scope):
                defined.setdefault(node.name, []).append(node)
        bodies: list[Sequence[ast.AST]] = [self._tree.body, *(node.body for node in self.functions)]
        bodies += [defined["check"][-1].body] if self.check else []
        bodies += [method.body for node in self.classes for method in _run_methods(node)]
        reached: list[ast.stmt] = []
        while bodies:
            for node in _walk(bodies.pop()):
                if isinstance(node, ast.stmt):
                    reached.append(node)
                name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
                for scope in defined.pop(name, []):
                    inner = _methods(scope) if isinstance(scope, ast.ClassDef) else [scope]
                    bodies += [function.body for function in inner]
        return reached

    def _imports(self) -> Iterator[str]:
        tried = {id(node) for block in ast.walk(self._tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
        nodes = [node for node in ast.walk(self._tree) if id(node) not in tried]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                raise Unscorable(
                    f"the test code has a relative import (line {node.lineno}), which belongs to no package"
                )
        for module in dict.fromkeys(_imported(nodes)):
            if module.split(".")[0] not in PROGRAM_MODULES:
                yield module


class _Counting(ast.NodeTransformer):
    """Insert calls of COUNTER into checks, and of EQUAL for `==`."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        operands = [node.left, *node.comparators]
        return ast.copy_location(ast.Call(ast.Name(EQUAL, ast.Load()), operands, []), node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [part for each in statements for part in _counted(each)])
        return node


def _counted(statement: ast.AST) -> list[ast.AST]:
    if not isinstance(statement, ast.stmt) or not _is_check(statement) or isinstance(statement, ast.Raise):
        return [statement]
    counter = ast.Name(COUNTER, ast.Load())
    if isinstance(statement, ast.Assert):
        statement.test = ast.copy_location(ast.Call(counter, [statement.test], []), statement.test)
        return [statement]
    return [ast.copy_location(ast.Expr(ast.Call(counter, [], [])), statement), statement]


def _is_check(node: ast.stmt) -> bool:
    """Whether a statement can fail the test. Raises Unscorable for an assert that can never fail."""
    if isinstance(node, ast.Assert):
        if isinstance(node.test, ast.Tuple) and node.test.elts:
            raise Unscorable(
                f"line {node.lineno} of the test code asserts a tuple, which is always true; remove the parentheses"
            )
        return any(isinstance(part, ast.Name | ast.Call | ast.Attribute) for part in ast.walk(node.test))
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(call, ast.Call) and _name(call.func).lower().startswith(("assert", "fail"))
    if isinstance(node, ast.With | ast.AsyncWith):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(_name(call.func) in _CONTEXTS for call in calls)
    if isinstance(node, ast.If | ast.Try | ast.For | ast.While):
        handlers = node.handlers if isinstance(node, ast.Try) else []
        parts = [*node.body, *node.orelse, *(part for handler in handlers for part in handler.body)]
        return any(map(_fails, parts))
    return isinstance(node, ast.Raise)


def _fails(node: ast.stmt) -> bool:
    """Whether a statement is a `raise`, `assert False`, or an exit."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    exits = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value.func) in _EXITS
    return exits or isinstance(node, ast.Raise)


def _without_runners(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Drop `unittest.main()` and similar, and unwrap `if __name__ == "__main__"`."""
    for node in body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test):
            yield from _without_runners(node.body)
            continue
        value = node.value if isinstance(node, ast.Expr) else None
        runs = isinstance(value, ast.Call) and (
            ast.unparse(value.func) in ("unittest.main", "pytest.main", "main")
            or any("pytest.main" in ast.unparse(part) for part in value.args)
        )
        if not (runs or isinstance(node, ast.Pass) or isinstance(value, ast.Constant)):  # the last is a docstring
            yield node


def _walk(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Walk statements without function bodies, which run only when called."""
    todo: list[ast.AST] = list(body)[::-1]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, _Function):
            todo += [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        else:
            todo += list(ast.iter_child_nodes(node))[::-1]


def _test_cases(top: Sequence[ast.AST]) -> set[str]:
    """Return the names of unittest classes, including indirect subclasses."""
    names: set[str] = set()
    for node in top:
        if isinstance(node, ast.ClassDef):
            bases = [_name(base) for base in node.bases]
            if any(base.endswith("TestCase") or base in names for base in bases):
                names.add(node.name)
    return names


def _methods(node: ast.ClassDef) -> list[_Function]:
    return [each for each in node.body if isinstance(each, _Function)]


def _run_methods(node: ast.ClassDef) -> list[_Function]:
    """Return the methods of a test class that pytest or unittest call."""
    names = ("test", "setUp", "setup", "tearDown", "teardown", "asyncSetUp", "asyncTearDown", "runTest")
    return [method for method in _methods(node) if method.name.startswith(names) and not _skipped(method)]


def _skipped(node: _Function | ast.ClassDef) -> bool:
    return not _decorators(node).isdisjoint(("skip", "xfail", "expectedFailure"))


def _decorators(node: _Function | ast.ClassDef) -> set[str]:
    return {_name(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list}


def _required(node: _Function) -> list[str]:
    """Return parameters without a default."""
    positional = [*node.args.posonlyargs, *node.args.args]
    first = positional[: len(positional) - len(node.args.defaults)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return [arg.arg for arg in first] + [arg.arg for arg, default in pairs if default is None]


def _fixtures(top: Sequence[ast.AST]) -> set[str]:
    """Return the fixtures that tests may use: unparametrised ones of the code, and a few of pytest's."""
    names = {"capsys", "tmp_path"} | ({"monkeypatch"} if _installed("pytest") else set())
    todo = {}
    for node in top:
        if isinstance(node, _Function) and "fixture" in _decorators(node):
            calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
            keys = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
            named = keys.get("name")
            name = str(named.value) if isinstance(named, ast.Constant) else node.name
            yields = any(isinstance(part, ast.Yield) for part in ast.walk(node))
            if "params" not in keys and not (isinstance(node, ast.AsyncFunctionDef) and yields):
                todo[name] = _required(node)
            names.discard(name)
    while found := {name for name, required in todo.items() if name not in names and names.issuperset(required)}:
        names |= found
    return names


def _require_fixtures(
    node: _Function, required: Sequence[str], decorators: Sequence[ast.expr], fixtures: Collection[str]
) -> None:
    """Raises Unscorable for a test that needs an unsupported fixture, or has no parameters."""
    given = set(fixtures)
    for each in decorators:
        if set(ast.unparse(each).split("(")[0].split(".")) & _FILLING:
            return
        if isinstance(each, ast.Call) and _name(each.func) == "parametrize":
            arguments = dict(zip(("argnames", "argvalues"), each.args, strict=False))
            arguments |= {keyword.arg: keyword.value for keyword in each.keywords if keyword.arg}
            values, names = arguments.get("argvalues"), arguments.get("argnames")
            if isinstance(values, ast.List | ast.Tuple) and not values.elts:
                raise Unscorable(f"the test `{node.name}` has no parameters: there is nothing to run")
            for text in names.elts if isinstance(names, ast.Tuple | ast.List) else [names]:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    given |= {part.strip() for part in text.value.split(",")}
    missing = [name for name in required if name not in given]
    if missing:
        raise Unscorable(
            f"the test `{node.name}` needs `{missing[0]}`, a fixture of pytest; fixtures that the test code defines "
            "without `params`, `capsys`, `tmp_path` and `monkeypatch` can be used; a function that is called itself "
            "needs another name"
        )


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _from_program(tree: ast.Module) -> set[str]:
    """Return names that code imports from the program's module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES:
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and _name(node.value) in PROGRAM_MODULES:
            names.add(node.attr)
    return names


def _imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _free_names(source: str) -> set[str]:
    """Return global names that code uses and does not bind."""
    top = symtable.symtable(source, "<tests>", "exec")
    bound = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        own = [each for each in table.get_symbols() if each.is_referenced() and (table is top or each.is_global())]
        used.update(each.get_name() for each in own)
    return used - bound - {"__name__", "__file__"} - set(dir(builtins))


@lru_cache(maxsize=1024)
def _installed(module: str) -> bool:
    """Whether a confined process can import a module."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    return PathFinder.find_spec(top, [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]) is not None

"""Run a program and one test of it inside a confined process. It imports nothing of rlhfless:
rlhfless.rewards.confinement compiles it, rlhfless.rewards.confined calls `run`.

The program runs first. What tests rely on (built-ins, modules they import, unittest's classes) is then restored, so a
program cannot pass by replacing `math.isclose` or `TestCase.assertEqual`.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Names that programs for judges use without importing them: the judges import them first.
_PRELUDE = {
    "typing": "List Dict Set Tuple Optional Any Union Callable Iterable Iterator Sequence Deque DefaultDict Generator",
    "collections": "deque defaultdict Counter OrderedDict namedtuple",
    "heapq": "heappush heappop heapify heappushpop heapreplace nlargest nsmallest merge",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate product permutations combinations combinations_with_replacement chain groupby zip_longest "
    "islice count cycle repeat starmap takewhile dropwhile tee pairwise",
    "functools": "lru_cache cache reduce cmp_to_key partial total_ordering",
    "math": "inf gcd lcm ceil floor sqrt log log2 log10 pi comb factorial isqrt prod hypot",
    "operator": "itemgetter attrgetter xor add mul",
    "string": "ascii_lowercase ascii_uppercase ascii_letters digits punctuation",
    "copy": "deepcopy",
    "dataclasses": "dataclass",
    "": "sys os re math heapq bisect itertools functools collections operator string random time copy json typing "
    "datetime",
}


# As judges set it: solutions for them recurse deeper than Python's 1000 without a word.
_RECURSION = 50_000
_MOST_STACK = 64 << 20
"""Bytes of a thread's stack; programs ask for up to 512 MiB, which would be all of their memory."""


def run(config: Mapping[str, Any]) -> int:
    """Run the program and the test; return the number of checks that ran. Raises what fails."""
    kind = config["kind"]
    _prepare_python()
    # Only a program that is judged by its output runs its part under `__name__ == "__main__"`.
    module = type(sys)("__main__" if kind == "output" else "solution")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # Python without `site` lacks them
    module.__dict__.update(__builtins__=builtins, __file__="solution.py")
    keep = _Kept(config["imports"])
    code = _first_that_compiles(config["sources"])
    if kind != "code":
        module.__dict__.update(_prelude(code, module.__dict__))
    if kind == "output":
        exec(code, module.__dict__)
        return 0
    try:  # noqa: SIM105 (contextlib takes time to import)
        exec(code, module.__dict__)
    except SystemExit:
        pass  # a script that ends with `sys.exit()`: what it has defined is tested
    keep.put_back()
    if kind == "call":
        return _called(module.__dict__, config)
    return _tested(module.__dict__, config)


def _prepare_python() -> None:
    """Set the limits that the judges of the field's data sets set."""
    import _thread

    sys.setrecursionlimit(_RECURSION)
    sys.set_int_max_str_digits(0)
    stack_size, opened = _thread.stack_size, builtins.open

    def limited(size: int = 0) -> int:
        return stack_size(min(size, _MOST_STACK))

    def open_(file: Any, *args: Any, **kwargs: Any) -> Any:
        # Standard input is a file without a name, and there is no /proc to look it up.
        return opened(0 if file in ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0") else file, *args, **kwargs)

    _thread.stack_size = limited
    builtins.open = open_


def _first_that_compiles(sources: list[str]) -> Any:
    error: Exception = SyntaxError("no program")
    for source in sources:
        try:
            return compile(source, "<code>", "exec")
        except (SyntaxError, ValueError) as failed:
            error = failed
    raise error


class _Kept:
    """Modules and unittest's classes as they were before the program ran."""

    def __init__(self, names: list[str]) -> None:
        self._modules = {}
        self._values: list[tuple[Any, dict[str, Any]]] = []
        for name in ("builtins", *names):
            try:
                __import__(name)
            except ImportError:
                continue
            while name and name in sys.modules:  # a package's parts, and the package
                module = self._modules[name] = sys.modules[name]
                self._values.append((module, dict(vars(module))))
                name = name.rpartition(".")[0]
        for module in [each for name, each in self._modules.items() if name == "unittest"]:
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            self._values += [(each, dict(vars(each))) for each in classes]

    def put_back(self) -> None:
        """Undo the program's changes."""
        for name in self._modules:
            sys.modules[name] = self._modules[name]
        for owner, values in self._values:
            now = vars(owner)
            for name in values:
                if name not in now or now[name] is not values[name]:
                    setattr(owner, name, values[name])


def _prelude(code: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of _PRELUDE that the code uses; its own definitions replace them."""
    used: set[str] = set()
    todo = [code]
    while todo:
        part = todo.pop()
        used.update(part.co_names)
        todo += [each for each in part.co_consts if type(each) is type(code)]
    values = {}
    for module, names in _PRELUDE.items():
        for name in names.split():
            if name in used and name not in given and name not in values:
                whole = __import__(module or name)
                values[name] = getattr(whole, name) if module else whole
    return values


def _function(namespace: Mapping[str, Any], name: str) -> Callable[..., Any]:
    """Return the function under test: a method of `Solution`, else of the module, which may import it."""
    first, *parts = name.replace("()", "").split(".")
    if first != "Solution" and hasattr(namespace.get("Solution"), first):
        first, parts = "Solution", [first, *parts]
    value = namespace[first]
    for part in parts:
        value = getattr(value() if isinstance(value, type) else value, part)
    assert callable(value)
    return value  # type: ignore[no-any-return]


# -- a call


def _called(namespace: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    result = _function(namespace, config["function"])(*config["arguments"])
    result = _finish(result)
    tolerance = config["float_tolerance"]
    if not any(_equal(result, accepted, tolerance) for accepted in config["accepted"]):
        raise AssertionError("another result")
    return 1


def _equal(value: Any, expected: Any, tolerance: float) -> bool:
    """Compare a result with the expected JSON value; a tuple is a list. Methods of the program's classes are never
    called."""
    if type(value).__module__.split(".")[0] == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        base: Any = list if isinstance(value, list) else tuple
        items = list(base.__iter__(value))
        if type(expected) is not list or len(items) != len(expected):
            return False
        return all(_equal(a, b, tolerance) for a, b in zip(items, expected, strict=True))
    if isinstance(value, dict):
        pairs = {_key(key): item for key, item in dict.items(value)}
        if type(expected) is not dict or pairs.keys() != expected.keys():
            return False
        return all(_equal(pairs[key], item, tolerance) for key, item in expected.items())
    if isinstance(value, str):
        return type(expected) is str and str.__str__(value) == expected
    if isinstance(value, int | float):
        number = float.__float__(value) if isinstance(value, float) else int.__index__(value)
        return type(expected) in (int, float, bool) and _close(number, expected, tolerance)
    return value is None and expected is None


def _key(key: Any) -> str:
    """Return a dict key as JSON writes it."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return repr(float.__float__(key) if isinstance(key, float) else int.__index__(key))


def _close(value: float, expected: float, tolerance: float) -> bool:
    if value == expected or (value != value and expected != expected):
        return True
    return type(expected) is float and abs(value - expected) <= tolerance * max(1.0, abs(expected))


# -- test code


def _tested(namespace: dict[str, Any], config: Mapping[str, Any]) -> int:
    checks = failed = 0

    def count(value: Any = True) -> bool:
        nonlocal checks, failed
        right = bool(value)
        checks, failed = checks + 1, failed + (not right)
        return right

    namespace[config["counter"]], namespace[config["equal"]] = count, _equals
    if config["function"]:
        namespace["candidate"] = _function(namespace, config["function"])
    exec(config["tests"], namespace)
    if config["check"]:
        namespace["check"](namespace["candidate"])
    _set_up(namespace.get("setup_module"))
    fixtures = _Fixtures(namespace)
    for name in config["functions"]:
        for arguments in _arguments(namespace[name]):
            _set_up(namespace.get("setup_function"))
            fixtures.call(namespace[name], arguments)
    cases = sys.modules["unittest"].TestCase if "unittest" in sys.modules else ()
    for name in config["classes"]:
        if issubclass(namespace[name], cases):
            checks += _unittests(namespace[name])
        else:
            _methods(namespace[name], fixtures)
    if failed:
        raise AssertionError("the test caught its own assert")
    return checks


def _equals(first: Any, second: Any) -> Any:
    """`first == second`, but an object of the program that equals everything equals nothing."""
    result = first == second
    return result if result is not True else not (_equals_all(first) or _equals_all(second))


def _equals_all(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(_equals_all(item) for item in value)
    if type(value) is dict:
        return any(_equals_all(item) for item in value.values())
    if type(value).__module__ not in ("solution", "__main__"):
        return False
    try:
        return (value == object()) is True
    except Exception:  # it compares with its own kind alone
        return False


def _unittests(case: Any) -> int:
    """Run a unittest class; return the number of tests that ran. Raises AssertionError."""
    unittest = sys.modules["unittest"]
    result = unittest.TestResult()
    unittest.TestSuite([unittest.TestLoader().loadTestsFromTestCase(case)]).run(result)
    if not result.wasSuccessful():
        raise AssertionError("a test failed")
    return result.testsRun - len(result.skipped) - len(result.expectedFailures)  # type: ignore[no-any-return]


def _methods(case: Any, fixtures: _Fixtures) -> None:
    """Run a pytest class."""
    _set_up(getattr(case, "setup_class", None))
    for name in [name for name in vars(case) if name.startswith("test")]:
        for arguments in _arguments(getattr(case, name), case):
            instance = case()
            _set_up(getattr(instance, "setup_method", None))
            fixtures.call(getattr(instance, name), arguments)


class _Fixtures:
    """Fixtures of the test code, and a few of pytest's, created again for every test."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._functions: dict[str, Any] = {"tmp_path": _tmp_path, "capsys": _capsys, "monkeypatch": _monkeypatch}
        self._always: list[str] = []
        self._made: dict[str, Any] = {}
        self._open: list[Iterator[Any]] = []
        for name, value in namespace.items():
            # Of pytest since 8.4.
            mark = getattr(value, "_fixture_function_marker", None)
            function = getattr(value, "_fixture_function", None)
            if mark is not None and getattr(getattr(function, "__code__", None), "co_filename", "") == "<tests>":
                self._functions[mark.name or name] = function
                self._always += [mark.name or name] if mark.autouse else []

    def call(self, test: Any, arguments: Mapping[str, Any]) -> None:
        """Call a test with these arguments and its fixtures, then close the fixtures."""
        self._made.clear()
        try:
            for name in self._always:
                self._value(name)
            _finish(test(**arguments, **self._values(test, arguments)))
        finally:
            while self._open:
                next(self._open.pop(), None)

    def _values(self, function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        code = getattr(function, "__code__", None)
        if code is None:
            return {}
        names = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
        names = names[hasattr(function, "__self__") :]
        return {name: self._value(name) for name in names if name not in given}

    def _value(self, name: str) -> Any:
        if name not in self._made:
            function = self._functions[name]
            value = _finish(function(**self._values(function, {})))
            if type(value).__name__ == "generator":
                self._open.append(value)
                value = next(value)
            self._made[name] = value
        return self._made[name]


def _tmp_path() -> Any:
    from pathlib import Path
    from tempfile import mkdtemp

    return Path(mkdtemp())


def _capsys() -> Iterator[Any]:
    from collections import namedtuple
    from io import StringIO

    class Captured:
        def readouterr(self) -> Any:
            texts = [vars(sys)[name].getvalue() for name in ("stdout", "stderr")]
            sys.stdout, sys.stderr = StringIO(), StringIO()
            return namedtuple("CaptureResult", "out err")(*texts)

    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = StringIO(), StringIO()
    yield Captured()
    sys.stdout, sys.stderr = before


def _monkeypatch() -> Iterator[Any]:
    patch = __import__("pytest").MonkeyPatch()
    yield patch
    patch.undo()


def _arguments(function: Any, case: Any = None) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call of a test: the product of its `parametrize` marks; none if it is skipped."""
    both = [*getattr(function, "pytestmark", []), *getattr(case, "pytestmark", [])]
    marks = {mark.name: mark for mark in both}
    skipped = "skip" in marks or "xfail" in marks or ("skipif" in marks and any(marks["skipif"].args[:1]))
    sets: list[dict[str, Any]] = [] if skipped else [{}]
    for mark in both:
        if mark.name == "parametrize":
            given = dict(zip(("argnames", "argvalues"), mark.args)) | mark.kwargs  # noqa: B905
            pairs = list(_parameters(given["argnames"], given["argvalues"]))
            sets = [{**one, **more} for one in sets for more in pairs]
    yield from sets


def _parameters(names: Any, values: Any) -> Iterator[dict[str, Any]]:
    names = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    for value in values:
        parts = getattr(value, "values", None) if type(value).__name__ == "ParameterSet" else None
        row = parts if parts is not None else [value] if len(names) == 1 else value
        yield dict(zip(names, row, strict=True))


def _set_up(function: Any) -> None:
    """Call a pytest setup function, if there is one, with or without an argument."""
    if function is not None:
        code = getattr(function, "__code__", None) or function.__func__.__code__
        bound = getattr(function, "__self__", None) is not None
        function(*[None] * max(0, code.co_argcount - bound))


def _finish(result: Any) -> Any:
    """Await the result if it is a coroutine."""
    if type(result).__name__ != "coroutine":
        return result
    import asyncio

    return asyncio.run(result)

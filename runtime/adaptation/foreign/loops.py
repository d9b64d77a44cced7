"""Another trainer's loops: does the one that steps stop at max_train_steps, and the one over epochs with it?

A step loop is one in which an optimizer steps, itself or in a function of the same file that it calls; an
epoch loop holds or calls a step loop. A loop is guarded where it leaves on a condition that the limit of
steps is part of, or where it runs no longer than that limit says.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from runtime.adaptation.foreign.questions import last

LIMITS = {
    "max_train_steps",
    "max_steps",
    "max_train_step",
    "max_training_steps",
    "total_steps",
    "num_train_steps",
}
# Whose names say nothing: a scheduler has a `step` too.
COMMON = {"step", "__init__", "__call__", "forward", "main", "train", "eval", "run"}
COMPARED = (ast.Compare, ast.BoolOp, ast.UnaryOp)

Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = Function | ast.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFound:
    kind: str
    """step or epoch"""
    line: int
    function: str
    guard: int | None
    """line of what stops it at the limit; None: nothing does"""


def scan(tree: ast.Module) -> tuple[list[LoopFound], bool]:
    """The training loops, and whether the file names a limit of steps at all."""
    reader = _Reader(tree)
    return sorted(reader.loops(), key=lambda loop: loop.line), _mentions(tree, LIMITS)


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        self.stopping = _stopping(tree)
        self.bounds = _bounds(tree, self.stopping)
        self.depths = self._depths()

    def loops(self) -> Iterator[LoopFound]:
        scopes: list[Scope] = [self.tree, *self.functions]
        for scope in scopes:
            name = scope.name if isinstance(scope, Function) else "<module>"
            for loop in _own(scope, Loop):
                depth = self._depth(loop, through=False)
                if depth in (0, 1) and not _over_optimizers(loop):
                    kind = "epoch" if depth else "step"
                    yield LoopFound(kind=kind, line=loop.lineno, function=name, guard=self._guard(loop))

    # -- depth: how many loops lie between a piece of code and the optimizer's step

    def _depths(self) -> dict[str, int]:
        """Functions that step, by name: 0 without a loop around it, 1 in a loop, 2 in two."""
        found: dict[str, int] = {}
        for _ in range(4):  # a trainer nests no deeper
            before = dict(found)
            self.depths = found
            for function in self.functions:
                depth = self._depth(function, through=True)
                if depth is not None and function.name not in COMMON - {"train", "run", "main"}:
                    found[function.name] = depth
            if found == before:
                break
        return found

    def _depth(self, node: ast.AST, *, through: bool) -> int | None:
        """Loops inside `node` around the step; None: nothing steps in it."""
        found: list[int] = []
        for part in _shallow(node):
            if isinstance(part, Loop):
                inner = self._depth(part, through=through)
                if inner is not None:
                    found.append(inner if _over_optimizers(part) else inner + 1)
            elif isinstance(part, ast.Call):
                found += self._stepped(part)
        return max(found, default=None)

    def _stepped(self, call: ast.Call) -> list[int]:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
            return [0] if "optim" in ast.unparse(call.func.value).lower() else []
        name = last(call.func)
        own = isinstance(call.func, ast.Name) or (
            isinstance(call.func, ast.Attribute) and last(call.func.value) in ("self", "cls")
        )
        return [self.depths[name]] if own and name in getattr(self, "depths", {}) else []

    # -- guards

    def _guard(self, loop: Loop) -> int | None:
        if isinstance(loop, ast.While):
            if self._tells(loop.test):
                return loop.lineno
        elif _mentions(loop.iter, self.bounds):
            return loop.lineno
        return self._way_out(loop.body)

    def _way_out(self, body: list[ast.stmt], *, inner: bool = False) -> int | None:
        """The line on which the limit leaves the loop; in a loop within it only by return."""
        for number, statement in enumerate(body):
            line = self._leaves(statement, inner=inner)
            if line is not None:
                return line
            if (
                not inner
                and _else_continues(statement)
                and any(isinstance(s, ast.Break) for s in body[number + 1 :])
            ):
                within = self._guard(statement) if isinstance(statement, Loop) else None
                if within is not None:
                    return within  # for ... else: continue; break
        return None

    def _leaves(self, statement: ast.stmt, *, inner: bool) -> int | None:
        if (
            isinstance(statement, ast.If)
            and self._tells(statement.test)
            and _goes(statement.body, inner=inner)
        ):
            return statement.lineno
        for block in _blocks(statement):
            within = inner or isinstance(statement, Loop)
            line = self._way_out(block, inner=within)
            if line is not None:
                return line
        return None

    def _tells(self, test: ast.expr) -> bool:
        return _mentions(test, self.stopping)


def _stopping(tree: ast.Module) -> set[str]:
    """Names that say whether the limit is reached: the limits, what was compared with one, functions of it."""
    names = set(LIMITS)
    for _ in range(3):
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                if _plain(node.value) and _mentions(node.value, names):
                    names |= set(_targets(node))
            elif isinstance(node, ast.If) and _mentions(node.test, names):
                names |= {name for part in node.body for name in _flag(part)}
            elif isinstance(node, Function) and node.name not in COMMON:
                returned = [part.value for part in _own(node, ast.Return) if part.value is not None]
                if any(isinstance(value, COMPARED) and _mentions(value, names) for value in returned):
                    names.add(node.name)
        if len(names) == before:
            break
    return names - {"self", "args", "config", "cfg", "i", "step"}


def _bounds(tree: ast.Module, stopping: set[str]) -> set[str]:
    """Names of a number of epochs that was divided from the limit by an epoch's steps, and the limits."""
    names = set(LIMITS) | {name for name in stopping if "step" in name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            divides = any(isinstance(part, ast.Div | ast.FloorDiv) for part in ast.walk(node.value))
            text = ast.unparse(node.value)
            if divides and _mentions(node.value, LIMITS) and ("per_epoch" in text or "len(" in text):
                names |= set(_targets(node))
    return names


def _plain(value: ast.expr) -> bool:
    """A comparison, another name for the same, or `int(...)` and `min(...)` of it."""
    if isinstance(value, ast.Call):
        return last(value.func) in ("int", "min") and all(_plain(argument) for argument in value.args)
    return isinstance(value, (*COMPARED, ast.Name, ast.Attribute, ast.Constant))


def _flag(statement: ast.stmt) -> list[str]:
    """`self.done = True`"""
    if (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is True
    ):
        return _targets(statement)
    return []


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name for target in targets if (name := last(target))]


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        last(part) in names
        or (isinstance(part, ast.keyword | ast.arg) and part.arg in names)
        or (
            isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.lstrip("-") in names
        )
        for part in ast.walk(node)
    )


def _goes(body: list[ast.stmt], *, inner: bool) -> bool:
    """Whether the block leaves the loop: by break, return or raise, also behind further conditions' ends."""
    out = ast.Return | ast.Raise if inner else ast.Return | ast.Raise | ast.Break
    return any(isinstance(statement, out) for statement in body)


def _else_continues(statement: ast.stmt) -> bool:
    return isinstance(statement, Loop) and any(isinstance(part, ast.Continue) for part in statement.orelse)


def _over_optimizers(loop: Loop) -> bool:
    return not isinstance(loop, ast.While) and "optim" in ast.unparse(loop.iter).lower()


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, Function | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block:
            yield block
    for handler in getattr(statement, "handlers", []):
        yield handler.body


def _shallow(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside `node`, not into functions, classes, nor into loops, which are yielded whole."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        yield child
        if not isinstance(child, Loop):
            yield from _shallow(child)


def _own(scope: ast.AST, kind: Any) -> Iterator[Any]:
    """All nodes of `kind` in `scope` but not in the functions and classes inside of it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, kind):
            yield child
        yield from _own(child, kind)

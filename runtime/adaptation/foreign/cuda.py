"""Another trainer's source, one file at a time: which lines know CUDA only. Read with `ast`, never run.

A line counts where it can be reached on a device that is not CUDA. What stands behind a question about
CUDA (`if torch.cuda.is_available():`, `device.type == "cuda"`), or in the other branch of one about XPU,
is not reached there. Comments and texts that are no device do not count: the syntax tree has no comments,
and only the places where a device is named are looked at.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.adaptation.foreign.questions import (
    asks,
    dotted,
    is_cuda,
    is_given,
    is_xpu,
    last,
    leaves,
    text_of,
    told_by,
)

CODE_MAX = 160  # characters of the line that are kept

MEND = {
    "cuda-call": "the same of torch.accelerator or torch.xpu, behind its is_available()",
    "cuda-device": "take the device from the launcher: accelerator.device, or a parameter",
    "cuda-autocast": "torch.autocast(device.type, dtype=torch.bfloat16)",
    "cuda-scaler": "no scaler: bf16 needs none; torch.amp.GradScaler(device.type) for fp16",
    "cuda-or-cpu": "ask torch.accelerator.current_accelerator() too: as written, XPU trains on the CPU",
    "cuda-required": "let every accelerator through",
    "nccl": "the backend of the device: xccl on XPU, or let accelerate choose",
    "flash-attention": 'attn_implementation="sdpa"; import the package only where it is used, with a fallback',
}
QUERIES = {"is_available", "device_count", "is_initialized"}  # harmless, and true or not: they only ask
PACKAGES = {"flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "transformer_engine"}
IMPORT_FAILS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
FLASH = {"flash_attention_2", "flash_attention_3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    kind: str
    line: int
    code: str


def scan(tree: ast.Module, lines: Sequence[str]) -> list[Finding]:
    """What knows CUDA only, in the order of the lines; a line is told once for each kind."""
    told = told_by(tree)
    first = _Reader(_aliases(tree), told, frozenset())
    first.block(tree.body)
    # `def swap_cuda` whose every use here stands behind a question is as guarded as its callers.
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "cuda" in node.name}
    used = {last(node) for node in ast.walk(tree)}
    guarded = frozenset((own & used) - first.used)
    reader = _Reader(_aliases(tree), told, guarded) if guarded else first
    if guarded:
        reader.block(tree.body)
    found = {(line, kind) for kind, line in reader.found}
    return [
        Finding(kind=kind, line=line, code=lines[line - 1].strip()[:CODE_MAX] if line <= len(lines) else "")
        for line, kind in sorted(found)
    ]


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name to what torch calls it: `from torch.cuda.amp import autocast as a`, `import torch.cuda as c`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if node.module.partition(".")[0] in ("torch", "accelerate"):
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith("torch")}
    return found


# ---- reading


class _Reader:
    """Walks statements in order, for a way out at the top guards all that follows it in its block."""

    def __init__(self, aliases: dict[str, str], told: frozenset[str], guarded: frozenset[str]) -> None:
        self.aliases = aliases
        self.told = told
        self.guarded = guarded
        self.used: set[str] = set()
        """names that are read where other devices come too"""
        self.found: list[tuple[str, int]] = []
        self.falls_back = False
        """inside of a try that catches a failed import"""

    def report(self, kind: str, node: ast.AST) -> None:
        if kind == "flash-attention" and self.falls_back:
            return
        self.found.append((kind, getattr(node, "lineno", 1)))

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)
            if isinstance(statement, ast.If) and leaves(statement.body) and self.asks(statement.test)[1]:
                return  # `if not torch.cuda.is_available(): return`: CUDA alone comes here
            if isinstance(statement, ast.Assert) and self.asks(statement.test)[0]:
                return

    def visit(self, node: ast.AST) -> None:
        special = getattr(self, f"visit_{type(node).__name__.lower()}", None)
        if special is not None:
            special(node)
        else:
            self.children(node)

    def asks(self, test: ast.expr) -> tuple[bool, bool]:
        return asks(test, self.told)

    def children(self, node: ast.AST) -> None:
        self.used.add(last(node))
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                if value and isinstance(value[0], ast.stmt):
                    self.block(value)
                else:
                    for item in value:
                        if isinstance(item, ast.AST):
                            self.visit(item)
            elif isinstance(value, ast.AST):
                self.visit(value)

    # -- branches

    def visit_if(self, node: ast.If) -> None:
        cuda_only, cuda_else = self.asks(node.test)
        if cuda_else and any(isinstance(part, ast.Raise) for part in node.body) and not is_xpu(node.test):
            self.report("cuda-required", node)
        self.visit(node.test)
        if not cuda_only:
            self.block(node.body)
        if not cuda_else:
            self.block(node.orelse)

    def visit_while(self, node: ast.While) -> None:
        self.visit(node.test)
        if not self.asks(node.test)[0]:
            self.block(node.body)
        self.block(node.orelse)

    def visit_assert(self, node: ast.Assert) -> None:
        if self.asks(node.test)[0]:
            self.report("cuda-required", node)
        else:
            self.children(node)

    def visit_ifexp(self, node: ast.IfExp) -> None:
        cuda_only, cuda_else = self.asks(node.test)
        chosen, other = (node.body, node.orelse) if cuda_only else (node.orelse, node.body)
        if (cuda_only or cuda_else) and _device_of(chosen) == "cuda" and _device_of(other) == "cpu":
            self.report("cuda-or-cpu", node)
        self.visit(node.test)
        if not cuda_only:
            self.given(node.body) if is_given(node.orelse) else self.visit(node.body)
        if not cuda_else:
            self.given(node.orelse) if is_given(node.body) else self.visit(node.orelse)

    def given(self, node: ast.expr) -> None:
        """What stands in where the user names no device: he can name XPU. Only what is nested is looked at."""
        if not (isinstance(node, ast.IfExp) and _device_of(node.body) and _device_of(node.orelse)):
            self.visit(node)

    def visit_compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            if not _device_of(side):  # `device == torch.device("cuda")` asks, and uses nothing
                self.visit(side)

    def visit_boolop(self, node: ast.BoolOp) -> None:
        # `torch.cuda.is_available() and torch.cuda.is_bf16_supported()`: what follows is CUDA's alone
        named = isinstance(node.op, ast.Or) and is_given(node.values[0])
        for value in node.values:
            self.given(value) if named else self.visit(value)
            cuda_only, cuda_else = self.asks(value)
            if cuda_only if isinstance(node.op, ast.And) else cuda_else:
                return

    def visit_try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers for name in _caught(handler)}
        if caught & IMPORT_FAILS:  # an import that may fail is what a fallback looks like
            before, self.falls_back = self.falls_back, True
            self.block(node.body)
            self.falls_back = before
        else:
            self.block(node.body)
        for handler in node.handlers:
            self.block(handler.body)
        self.block(node.orelse)
        self.block(node.finalbody)

    # -- what knows CUDA only

    def visit_import(self, node: ast.Import) -> None:
        if any(alias.name.partition(".")[0] in PACKAGES for alias in node.names):
            self.report("flash-attention", node)

    def visit_importfrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level and node.module.partition(".")[0] in PACKAGES:
            self.report("flash-attention", node)

    def visit_call(self, node: ast.Call) -> None:
        name = self.resolve(dotted(node.func))
        kind = _call_kind(node, name)
        if kind:
            self.report(kind, node)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            self.keyword(node, keyword, counted=kind in ("cuda-autocast", "cuda-scaler"))
        self.used.add(last(node.func))
        if not kind:
            self.visit(node.func)
        elif isinstance(node.func, ast.Attribute) and not name:
            self.visit(node.func.value)

    def keyword(self, call: ast.Call, keyword: ast.keyword, *, counted: bool) -> None:
        name = keyword.arg or ""
        if name == "attn_implementation" and text_of(keyword.value) in FLASH:
            self.report("flash-attention", keyword.value)
        elif name == "backend" and text_of(keyword.value) == "nccl":
            self.report("nccl", keyword.value)
        elif _names_device(name) and is_cuda(keyword.value) and not counted:
            self.report("cuda-device", keyword.value)
        elif not (name == "default" and _is_option(call)):  # an option: the user can name XPU
            self.visit(keyword.value)

    def visit_attribute(self, node: ast.Attribute) -> None:
        name = self.resolve(dotted(node))
        if name.startswith("torch.cuda.") and name.split(".")[2] not in QUERIES:
            self.report("cuda-call", node)  # handed on, or used as a context without a call
        elif name:
            self.used.add(last(node))
        else:
            self.children(node)

    def visit_assign(self, node: ast.Assign) -> None:
        self.assigned(node.targets, node.value)

    def visit_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assigned([node.target], node.value)

    def assigned(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        names = [last(target) for target in targets]
        if any(_names_device(name) for name in names) and is_cuda(value):
            self.report("cuda-device", value)
        elif any("attn" in name for name in names) and text_of(value) in FLASH:
            self.report("flash-attention", value)
        else:
            self.visit(value)

    def visit_classdef(self, node: ast.ClassDef) -> None:
        init = next(
            (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"),
            None,
        )
        if init is not None and any(self._requires(statement) for statement in init.body):
            self.block([init])  # no object of it is made elsewhere
        else:
            self.children(node)

    def _requires(self, statement: ast.stmt) -> bool:
        """Lets CUDA through alone."""
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
            return self.asks(statement.test)[1] and not is_xpu(statement.test)
        return isinstance(statement, ast.Assert) and self.asks(statement.test)[0]

    def visit_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        named = [
            *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
        ]
        named += [
            (a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None
        ]
        for argument, default in named:
            if _names_device(argument.arg) and is_cuda(default):
                self.report("cuda-device", default)
            else:
                self.visit(default)
        if node.name not in self.guarded:
            self.block(node.body)

    visit_asyncfunctiondef = visit_functiondef

    def resolve(self, name: str) -> str:
        root, dot, rest = name.partition(".")
        return self.aliases[root] + dot + rest if root in self.aliases else name


def _call_kind(node: ast.Call, name: str) -> str | None:
    """What a call is that knows CUDA only, by its torch name and its arguments."""
    first = node.args[0] if node.args else None
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    place = first if first is not None else keywords.get("device_type", keywords.get("device"))
    last = name.rpartition(".")[2]
    if last == "autocast" and (name.startswith("torch.cuda.") or is_cuda(place)):
        return "cuda-autocast"
    if last == "GradScaler" and name.startswith("torch."):
        alone = name.startswith("torch.cuda.") or place is None
        return "cuda-scaler" if alone or is_cuda(place) else None
    if name.startswith("torch.cuda.") and name.split(".")[2] not in QUERIES:
        return "cuda-call"
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method == "cuda" and not name.startswith("torch.cuda"):
        return "cuda-call"
    if last == "init_process_group" and text_of(first) == "nccl":
        return "nccl"
    if (name == "torch.device" or method == "to" or name == "torch.Generator") and is_cuda(first):
        return "cuda-device"
    return None


def _names_device(name: str) -> bool:
    return "device" in name.lower() or name == "map_location"


def _is_option(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("add_argument", "option", "Option")


def _device_of(node: ast.expr) -> str:
    """`cuda` or `cpu` where an expression is just that."""
    if isinstance(node, ast.Call) and node.args and dotted(node.func).endswith("device"):
        return _device_of(node.args[0])
    return "cuda" if is_cuda(node) else "cpu" if text_of(node) == "cpu" else ""


def _caught(handler: ast.ExceptHandler) -> Iterator[str]:
    if handler.type is None:
        yield "BaseException"
        return
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    yield from (dotted(item).rpartition(".")[2] for item in types)

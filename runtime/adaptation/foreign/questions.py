"""What a condition says of the device: can it hold only on CUDA, or fail only there?"""

import ast
from collections.abc import Sequence


def dotted(node: ast.AST) -> str:
    """`torch.cuda.amp.autocast` of nested attributes; "" where its root is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def asks(test: ast.expr, told: frozenset[str] = frozenset()) -> tuple[bool, bool]:
    """Whether `test` can be true only on CUDA, and whether it can be false only there (or only on XPU...).

    The first: its body is not reached elsewhere. The second: its else is not, nor what follows a way out. `told`: names
    that were assigned such a question.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        body, other = asks(test.operand, told)
        return other, body
    if isinstance(test, ast.BoolOp):
        sides = [asks(value, told) for value in test.values]
        true = [side[0] for side in sides]
        false = [side[1] for side in sides]
        if isinstance(test.op, ast.And):
            return any(true), all(false)
        return all(true), any(false)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(test)
    if isinstance(test, ast.NamedExpr):
        return asks(test.value, told)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "startswith":
        return any(is_cuda(argument) for argument in test.args), False
    name = _spoken(test)
    return "cuda" in name or last(test) in told, "xpu" in name or name.endswith("accelerator.is_available")


def _compared(test: ast.Compare) -> tuple[bool, bool]:
    operator, sides = test.ops[0], (test.left, test.comparators[0])
    if isinstance(operator, ast.Is | ast.IsNot) and any(_is_none(side) for side in sides):
        known = any("cuda" in _spoken(side) for side in sides)  # `if cuda_state is not None`
        return known and isinstance(operator, ast.IsNot), known and isinstance(operator, ast.Is)
    texts = [text for side in sides for text in _texts(side)]
    cuda = any(text.partition(":")[0] == "cuda" for text in texts)
    xpu = any(text.partition(":")[0] == "xpu" for text in texts)
    if isinstance(operator, ast.Gt | ast.GtE) and "cuda" in _spoken(test.left):
        return True, False  # torch.cuda.device_count() > 1
    if isinstance(operator, ast.Eq | ast.In | ast.Is):
        return cuda and not xpu, xpu
    if isinstance(operator, ast.NotEq | ast.NotIn | ast.IsNot):
        return xpu, cuda and not xpu
    return False, False


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Call):  # device == torch.device("cuda")
        return [text for argument in node.args for text in _texts(argument)]
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _spoken(node: ast.expr) -> str:
    """The name that a question asks by: `torch.cuda.is_available`, `self.use_cuda`; of hasattr its text too."""
    if isinstance(node, ast.Call):
        texts = ".".join(text for argument in node.args for text in _texts(argument))
        own = dotted(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        return f"{texts}.{own}".lower() if own in ("hasattr", "getattr") else own.lower()
    return (dotted(node) or (node.attr if isinstance(node, ast.Attribute) else "")).lower()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_cuda(node: ast.AST | None) -> bool:
    """The text `cuda`, `cuda:0`, or one that is put together from `cuda:`."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return is_cuda(node.values[0])
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and (text == "cuda" or text.startswith("cuda:"))


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether the block always goes out of what follows it."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def is_given(node: ast.expr) -> bool:
    """A device that came from outside: `args.device`, `device`, `torch.device(args.device)`."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return is_given(node.args[0])
    return isinstance(node, ast.Name | ast.Attribute) and "device" in last(node)


def is_xpu(test: ast.expr) -> bool:
    """A question about XPU, whose other branch XPU does not take."""
    return asks(test)[1] and "xpu" in ast.unparse(test)


def text_of(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def told_by(tree: ast.AST) -> frozenset[str]:
    """Names that hold the answer of a question about CUDA: `offload = args.offload and device.type == "cuda"`."""
    answers: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                name = last(target)
                answers[name] = answers.get(name, True) and _answers(node.value)
    return frozenset(name for name, only in answers.items() if only and name)


def _answers(value: ast.expr) -> bool:
    asked = isinstance(value, ast.Call) and last(value.func) == "is_available"
    return (asked or isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp)) and asks(value)[0]

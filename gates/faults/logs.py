"""A training log as the faults see it: lines with their places, where it stops, how the process ended.

A log may have 100 MB and more; its head says what was loaded, its tail how it ended, and no more is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HEAD, TAIL = 512 * 2**10, 1024 * 2**10  # bytes
STOPPED = (0, 130, 0xC000013A, -2)  # as it should, or by Ctrl-C
LINE_MAX = 2000  # characters of a line that are looked at: a dumped tensor is no message

# In the order in which a run passes through them; the last that a log shows is where it stops. Words of
# qflux, musubi-tuner, SimpleTuner and of `finetune`.
STAGES: dict[str, re.Pattern[str]] = {
    "load": re.compile(
        r"loading (checkpoint shards|pipeline components|safetensors|(the )?(dit|transformer|model|vae|"
        r"text.?encoder|qwen|weights|base|denoiser))|load(ed)? (dit|transformer|text encoder|vae|model)\b|"
        r"quantiz(e|ing) (the )?(dit|transformer|model|text)|^load the |from_pretrained",
        re.I,
    ),
    "encode": re.compile(
        r"cache-build mode|\bcaching\b|--cache\b|encod(e|ing) (the )?(samples|dataset|prompts|images|latents)|"
        r"cache_(latents|text_encoder)|^cache \d+/\d+|precomput(e|ing)",
        re.I,
    ),
    "adapter": re.compile(
        r"(lora|trainable|adapter) (params|parameters|modules)\b|trainable params|"
        r"number of trainable param|lora parameter count|create lora|^trains +(lora|dora)|"
        r"added? lora|lora adapter",
        re.I,
    ),
    "optimizer": re.compile(
        r"(prepar|creat|construct|us|configur|load)\w* (the )?(\d+.?bit )?\w*\s?optimizer|optimizer ?[:=(]|"
        r"\boptim(izer)?\.\w*adam\w*|\badamw?_?8bit|running training|start(ing)? training",
        re.I,
    ),
    "step": re.compile(
        r"\b(avr_|step_|train_|smooth_)?loss['\"]? ?[=: ] ?(nan|inf|-?\d)|^fit \d+/\d+|"
        r"(steps|epoch \d+)[: ].*[1-9]\d*/\d+ ?\[",
        re.I,
    ),
    "done": re.compile(
        r"training (is )?(complete|completed|finished|done)|model saved|saved the final|"
        r"(stopped at step \d+ as planned)|: completed, |fit (mode )?(completed|finished|done)|"
        r"cache (phase |build )?(complete|completed|finished|done)|^next: gate check",
        re.I,
    ),
}
ORDER = ("start", *STAGES)
SPOKEN = {
    "start": "before a model was loaded",
    "load": "while the model was being loaded",
    "encode": "in the cache phase",
    "adapter": "after the adapter was added, before the optimizer",
    "optimizer": "at the first optimizer step: the optimizer is there and no loss yet",
    "step": "after training steps were done",
    "done": "after its own end",
}
_WORD = re.compile(
    r"^Traceback \(most recent call last\)|^(\w+\.)*\w*(Error|Exception|Interrupt)\b|^(error|fatal): |"
    r"\bInvalidModule\b|^KeyboardInterrupt|terminate called|core dumped",
    re.I,
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Line:
    where: str
    """`train.log:12`, or `train.log:end-3` where what lies before was not read"""
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    lines: tuple[Line, ...]
    exit_code: int | None = None
    ended: bool | None = None
    """whether it ended otherwise than it should; None: nothing says so"""
    limit: int | None = None
    """steps that were asked for, where the run's own record says so"""
    at: str | None = None
    """the stage that the run's own record proves"""

    @property
    def stage(self) -> str:
        """The last that the log shows; the record of the run may know of a later one."""
        seen = self.at or "start"
        for line in self.lines:
            seen = next(
                (name for name in reversed(STAGES) if later(name, seen) and STAGES[name].search(line.text)),
                seen,
            )
        return seen

    @property
    def died(self) -> bool | None:
        """Whether the process ended wrongly; None where nothing says so."""
        if self.exit_code is not None:
            return self.exit_code not in STOPPED
        return None if self.stage == "done" else self.ended

    @property
    def silent(self) -> bool:
        """No exception, no error line, no word of an end."""
        return self.stage != "done" and not any(_WORD.search(line.text) for line in self.lines)

    def find(self, pattern: str) -> Line | None:
        """The last line that shows it: what came last is nearest to the end."""
        wanted = re.compile(pattern, re.I)
        return next((line for line in reversed(self.lines) if wanted.search(line.text)), None)

    def last(self) -> Line | None:
        return self.lines[-1] if self.lines else None

    def with_(self, other: "Log") -> "Log":
        return replace(self, lines=(*self.lines, *other.lines))


def later(stage: str, than: str) -> bool:
    return ORDER.index(stage) > ORDER.index(than)


def read(path: Path, *, exit_code: int | None = None) -> Log:
    """Head and tail of `path`. Raises OSError."""
    with path.open("rb") as handle:
        head = handle.read(HEAD)
        size = handle.seek(0, 2)
        start = max(HEAD, (size - TAIL) // 2 * 2)  # even, for UTF-16
        handle.seek(start)
        tail = handle.read(TAIL + 1)
    code = encoding(head)
    if start == HEAD:  # one piece: nothing lies between
        return Log(lines=tuple(numbered(path.name, decode(head + tail, code))), exit_code=exit_code)
    first = decode(head, code)[:-1]  # cut in the middle of a line
    rest = decode(tail, code)[1:]
    ends = [Line(f"{path.name}:end-{len(rest) - index}", text) for index, text in enumerate(rest)]
    return Log(lines=(*numbered(path.name, first), *_worded(ends)), exit_code=exit_code)


def encoding(head: bytes) -> str:
    """PowerShell's `>` writes UTF-16 with a mark."""
    if head.startswith(b"\xff\xfe"):
        return "utf-16-le"
    return "utf-16-be" if head.startswith(b"\xfe\xff") else "utf-8"


def decode(data: bytes, code: str) -> list[str]:
    """Lines; a progress bar's redrawings (`\\r`) are lines of their own."""
    text = data.decode(code, errors="replace").removeprefix("\ufeff")
    return [_ANSI.sub("", line)[:LINE_MAX].rstrip() for line in re.split(r"\r\n|\n|\r", text)]


def numbered(name: str, lines: list[str]) -> Iterator[Line]:
    return _worded([Line(f"{name}:{number}", text) for number, text in enumerate(lines, 1)])


def _worded(lines: list[Line]) -> Iterator[Line]:
    return (line for line in lines if line.text.strip())

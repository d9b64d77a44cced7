"""Training loops of several trainers' shapes: which are found, and on which line the limit leaves them."""

import ast
import textwrap

import pytest

from runtime.adaptation.foreign import loops

# name: source, {(kind, line): line of the guard or None}
CASES: dict[str, tuple[str, dict[tuple[str, int], int | None]]] = {
    "qflux unguarded: two methods, the limit only for the scheduler": (
        """\
        class Trainer:
            def fit(self):
                self.scheduler = get_scheduler(self.optimizer, self.config.train.max_train_steps)
                for epoch in range(self.config.train.num_epochs):
                    self.train_epoch(epoch)
            def train_epoch(self, epoch):
                for batch in self.loader:
                    with self.accelerator.accumulate(self.model):
                        loss = self.step_of(batch)
                        self.optimizer.step()
                    if self.accelerator.sync_gradients:
                        self.global_step += 1
        """,
        {("epoch", 4): None, ("step", 7): None},
    ),
    "qflux with the inner guard alone": (
        """\
        class Trainer:
            def fit(self):
                for epoch in range(self.num_epochs):
                    self.train_epoch(epoch)
            def train_epoch(self, epoch):
                for batch in self.loader:
                    self.optimizer.step()
                    if self.global_step >= self.config.train.max_train_steps:
                        return
        """,
        {("epoch", 3): None, ("step", 6): 8},
    ),
    "qflux with both guards": (
        """\
        class Trainer:
            def fit(self):
                for epoch in range(self.num_epochs):
                    self.train_epoch(epoch)
                    if self.global_step >= self.config.train.max_train_steps:
                        break
            def train_epoch(self, epoch):
                for batch in self.loader:
                    self.optimizer.step()
                    if self.global_step >= self.config.train.max_train_steps:
                        self.save()
                        return
        """,
        {("epoch", 3): 5, ("step", 8): 10},
    ),
    "musubi: epochs divided from the limit, an inner break": (
        """\
        def train(args):
            per_epoch = math.ceil(len(loader) / args.accumulation)
            num_train_epochs = math.ceil(args.max_train_steps / len(loader))
            for epoch in range(num_train_epochs):
                for step, batch in enumerate(loader):
                    optimizer.step()
                    scheduler.step()
                    if global_step >= args.max_train_steps:
                        break
        """,
        {("epoch", 4): 4, ("step", 5): 8},
    ),
    "musubi: the inner break, epochs from elsewhere": (
        """\
        def train(args):
            for epoch in range(args.epochs):
                for batch in loader:
                    optimizer.step()
                    if global_step >= args.max_train_steps:
                        break
        """,
        {("epoch", 2): None, ("step", 3): 5},
    ),
    "epochs divided from the limit by something else": (
        """\
        def train(args):
            epochs = int(args.max_train_steps / args.batch / args.processes)
            for epoch in range(epochs):
                for batch in loader:
                    optimizer.step()
        """,
        {("epoch", 3): None, ("step", 4): None},
    ),
    "a return leaves both": (
        """\
        def train(args):
            for epoch in range(3):
                for batch in loader:
                    optimizer.step()
                    if step >= args.max_train_steps:
                        return
        """,
        {("epoch", 2): 5, ("step", 3): 5},
    ),
    "for, else continue, break": (
        """\
        def train(args):
            for epoch in range(3):
                for batch in loader:
                    optimizer.step()
                    if step >= args.max_train_steps:
                        break
                else:
                    continue
                break
        """,
        {("epoch", 2): 5, ("step", 3): 5},
    ),
    "SimpleTuner: a flag and a property": (
        """\
        class Trainer:
            def done(self):
                return self.state["global_step"] >= self.config.max_train_steps
            def train(self):
                for epoch in range(self.first, self.epochs + 1):
                    if self.done():
                        break
                    for step, batch in enumerate(self.loader):
                        self.optimizer.step()
                        if self.state["global_step"] >= self.config.max_train_steps:
                            self.stopping = True
                        if self.stopping or self.abort:
                            break
        """,
        {("epoch", 5): 6, ("step", 8): 12},
    ),
    "while the limit is not reached": (
        """\
        step = 0
        while step < max_train_steps:
            for batch in loader:
                optimizer.step()
                step += 1
                if step == max_train_steps:
                    break
        """,
        {("epoch", 2): 2, ("step", 3): 6},
    ),
    "a range over the limit": (
        """\
        def train(max_steps):
            for step in range(max_steps):
                loss.backward()
                optimizer.step()
        """,
        {("step", 2): 2},
    ),
    "a limit that only logs": (
        """\
        def train(args):
            for batch in loader:
                optimizer.step()
                if step >= args.max_train_steps:
                    print("that was it")
                if math.isnan(loss):
                    break
        """,
        {("step", 2): None},
    ),
    "a break that leaves only a loop inside": (
        """\
        def train(args):
            for batch in loader:
                optimizer.step()
                for sample in batch:
                    if step >= args.max_train_steps:
                        break
        """,
        {("step", 2): None},
    ),
    "the optimizer steps in a helper; several optimizers": (
        """\
        class Trainer:
            def update(self):
                for optimizer in self.optimizers:
                    optimizer.step()
            def train(self):
                for batch in self.loader:
                    self.update()
                    if self.count >= self.max_train_steps:
                        break
        """,
        {("step", 6): 8},
    ),
    "no training: schedulers step, sampling loops": (
        """\
        def sample(max_train_steps):
            for t in timesteps:
                latents = scheduler.step(noise, t, latents).prev_sample
            for scheduler in schedulers:
                scheduler.step()
        class Optimizer:
            def step(self):
                for group in self.param_groups:
                    self.update(group)
        """,
        {},
    ),
    "a name for the limit": (
        """\
        def train(args):
            limit = int(args.max_train_steps)
            for batch in loader:
                optimizer.step()
                reached = step >= limit
                if reached:
                    break
        """,
        {("step", 3): 6},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loops(name: str) -> None:
    source, wanted = CASES[name]
    found, _ = loops.scan(ast.parse(textwrap.dedent(source)))
    assert {(loop.kind, loop.line): loop.guard for loop in found} == wanted


def test_precision_and_recall() -> None:
    """Of 8 loops without a way out all are told, and none of the 17 that have one."""
    found = [
        loop for source, _ in CASES.values() for loop in loops.scan(ast.parse(textwrap.dedent(source)))[0]
    ]
    wanted = [guard for _, loops_ in CASES.values() for guard in loops_.values()]
    bare = sum(loop.guard is None for loop in found)
    assert (bare, len(found) - bare) == (wanted.count(None), len(wanted) - wanted.count(None)) == (8, 17)


@pytest.mark.parametrize(
    ("source", "limited"),
    [
        ("parser.add_argument('--max_train_steps')", True),
        ("train(max_train_steps=5)", True),
        ("class Train:\n    max_train_steps: int = 1000", True),
        ("config['max_train_steps']", True),
        ("# max_train_steps\nx = 'stops at max_train_steps'", False),
        ("epochs = 3", False),
    ],
)
def test_whether_a_limit_is_taken(source: str, limited: bool) -> None:
    assert loops.scan(ast.parse(source))[1] is limited

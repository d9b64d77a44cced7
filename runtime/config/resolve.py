"""The config that a phase really uses: defaults filled in, every `auto` replaced, with the reason."""

from dataclasses import dataclass

from runtime.adaptation.choices import refuse_broken
from runtime.config.model import Config
from runtime.planning.plan import Choice, resolve_choices
from runtime.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """`choices`: by dotted key, what an `auto` became and why."""

    config: Config
    choices: dict[str, Choice]


def resolve(workspace: Workspace, config: Config) -> Resolved:
    """No later code meets an `auto`. Raises UserError where a device or the dataset's list is absent.

    So it does where `config` asks for what step 05 found not to work on this device.
    """
    choices = resolve_choices(workspace, config)
    refuse_broken(workspace, config, choices["hardware.device"].value)
    document = config.model_dump(mode="json")
    for dotted, choice in choices.items():
        *path, leaf = dotted.split(".")
        section = document
        for name in path:
            section = section[name]
        section[leaf] = choice.value
    return Resolved(config=Config.model_validate(document), choices=choices)

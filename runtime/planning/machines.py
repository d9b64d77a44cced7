"""Machines that a plan can be made for without one of them at hand: `finetune plan --for NAME`.

Integrated graphics fill the host's RAM, up to a ceiling that Windows sets: 57 % with Intel's driver, 75 % where
the slider Shared GPU Memory Override was raised. Windows shows a little less RAM than was built in (31.5 of 32 GiB
on Lunar Lake).
"""

from dataclasses import dataclass

from runtime.planning.budget import RAM_SHARE, Budget

SEEN_SHARE = 0.975  # of the RAM that was built in, what the system shows
DEFAULT_CEILING, RAISED_CEILING = 0.57, 0.75
DEVICE_SHARE = 0.95  # as runtime.device.ACCELERATOR_SHARE
CARD_HOST_GIB = 32  # RAM of a machine with a card: a guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    name: str
    told: str
    ram_gib: float
    """Built in."""
    offered_gib: float
    """What the graphics may fill."""
    unified: bool

    def budget(self) -> Budget:
        return Budget(
            device="xpu",
            reason=f"the plan is for {self.name}: {self.told}",
            gib=self.offered_gib * DEVICE_SHARE,
            source=f"{DEVICE_SHARE:.0%} of the {self.offered_gib:.1f} GiB that the graphics of {self.name} may fill",
            host_gib=self.ram_gib * SEEN_SHARE * RAM_SHARE,
            unified=self.unified,
        )


def _shared(ram: int, ceiling: float, suffix: str) -> Machine:
    return Machine(
        name=f"pc{ram}{suffix}",
        told=f"{ram} GiB of unified memory, {ceiling:.0%} of it for the graphics",
        ram_gib=ram,
        offered_gib=ram * SEEN_SHARE * ceiling,
        unified=True,
    )


def _card(size: int) -> Machine:
    told = f"a card of {size} GiB, and {CARD_HOST_GIB} GiB of RAM"
    return Machine(name=f"card{size}", told=told, ram_gib=CARD_HOST_GIB, offered_gib=size, unified=False)


MACHINES = {
    machine.name: machine
    for machine in (
        *(
            _shared(ram, ceiling, suffix)
            for ram in (16, 32, 64, 96)
            for ceiling, suffix in ((DEFAULT_CEILING, ""), (RAISED_CEILING, "-raised"))
        ),
        _card(24),
        _card(32),
    )
}

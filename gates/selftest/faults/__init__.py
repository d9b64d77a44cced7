"""The faults of `gate selftest`, gate by gate. To add one, add a row to the table of its module."""

from gates.selftest.faults import (
    adaptation,
    cache,
    checkout,
    config,
    dataset,
    environment,
    full,
    host,
    quantize,
    recorded,
    runs,
    shapes,
    validation,
)
from gates.selftest.faults.row import Fault

FAULTS: dict[str, tuple[Fault, ...]] = {
    "01": host.FAULTS,
    "02": dataset.FAULTS,
    "03": environment.FAULTS,
    "04": config.FAULTS,
    "05": adaptation.FAULTS + checkout.FAULTS,
    "06": quantize.FAULTS,
    "07": cache.FAULTS + runs.FAULTS + full.FAULTS,
    "08": validation.FAULTS,
}
for _more in (shapes.FAULTS, recorded.FAULTS):
    for _gate, _rows in _more.items():
        FAULTS[_gate] += _rows

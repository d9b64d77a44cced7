"""Import intel-extension-for-pytorch, which may end the process (exit 127) beside another torch; see ../child.py."""

import importlib
import json
from typing import Any


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


if __name__ == "__main__":
    say(stage="import intel_extension_for_pytorch")
    importlib.import_module("intel_extension_for_pytorch")
    say(done=True)

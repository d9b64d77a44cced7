"""Shells, paths and sign-ins, mostly on Windows."""

from gates.faults.model import Fault

FAULTS = (
    Fault(
        id="vars-bat-not-found",
        title="oneAPI's setvars.bat does not find its own scripts",
        patterns=(r"'vars\.bat' is not recogni[sz]ed", r"vars\.bat.*(not recogni[sz]ed|not found)"),
        cause="NoDefaultCurrentDirectoryInExePath is set: cmd then finds no script in the current folder.",
        mend=(
            "clear the variable around the call of setvars.bat and set it again after; train_xpu.bat does",
            "or need no oneAPI: optimizer.class_path: torch.optim.AdamW compiles no Triton kernel",
        ),
        sources=("training step, 7.2", "one-file predecessor of the series"),
    ),
    Fault(
        id="checkout-invalid-path",
        title="git can't check a file out whose name Windows refuses",
        patterns=(r"error: invalid path '[^']*'", r"unable to create file .*(invalid argument|filename)"),
        cause="qflux has a file with a colon in its name and a folder named with a blank.",
        mend=(
            "git clone --no-checkout, then git checkout HEAD -- . with ':(exclude)PATH' for each path that the "
            "error names",
        ),
        sources=("one-file predecessor of the series",),
    ),
    Fault(
        id="hub-sign-in",
        title="Importing qflux signs in to the hub, and there is no token",
        patterns=(r"KeyError: ['\"]HF_TOKEN['\"]",),
        cause="The import calls login(HF_TOKEN) unless QFLUX_DOTENV_LOADED is set.",
        mend=("set the environment variable QFLUX_DOTENV_LOADED=1",),
        sources=("reference 1.6",),
    ),
)

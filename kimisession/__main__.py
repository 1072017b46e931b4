"""`python -m kimisession`, and what the console script runs: the commands, reached so that Ctrl-C is never a traceback."""

import gc
import os
import sys


def main() -> None:
    """Load the commands and run one. Ctrl-C while they load gets one sentence, like later."""
    for name in ("stdout", "stderr"):  # closed by whoever started this, as cron jobs do with 2>&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    try:
        gc.disable()  # modules are no garbage: looking for some while they load is a fifteenth of `--help`
        from kimisession.cli.app import main as run

        gc.enable()
        run()
    except KeyboardInterrupt:
        print("error: interrupted before anything was done", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

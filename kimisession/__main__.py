"""`python -m kimisession`, and what the console script runs: the commands, reached so that Ctrl-C is never a traceback."""

import gc
import sys


def main() -> None:
    """Load the commands and run one. Ctrl-C while they load gets one sentence, like later."""
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

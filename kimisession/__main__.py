"""`python -m kimisession`, and what the console script runs: the commands, reached so that Ctrl-C is never a traceback."""

import sys


def main() -> None:
    """Load the commands and run one. Ctrl-C while they load gets one sentence, like later."""
    try:
        from kimisession.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("error: interrupted before anything was done", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

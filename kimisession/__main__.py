"""`python -m kimisession`."""

from kimisession.cli.app import main

main()

"""`python -m rltrace`, where the command is not on the PATH."""

from rltrace.cli import main

main(prog_name="python -m rltrace")

"""`python -m rltrace.otlp RECORDING`, to be started by hand beside a program that records itself; it is
`run/live_export.py`."""

from rltrace.run.live_export import main

if __name__ == "__main__":
    main()

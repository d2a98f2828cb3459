"""`python -m rltrace.sampler RECORDING`, to be started by hand on another host of a run; it is `run/sampler.py`."""

from rltrace.run.sampler import main

if __name__ == "__main__":
    main()

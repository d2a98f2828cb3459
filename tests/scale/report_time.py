"""How long a report takes apart from reading, and how large it is: `python tests/scale/report_time.py RECORDING...`."""

from __future__ import annotations

import argparse
import resource
import time
from itertools import pairwise
from pathlib import Path

from rltrace_exporters.report.page import page
from rltrace_exporters.report.values import RunValues
from rltrace_exporters.report.writing import written

from rltrace.analysis.findings import why
from rltrace.analysis.summary import analyse
from rltrace.host.garbage_collector import without_collection
from rltrace.read.recording import Recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="+", metavar="RECORDING")
    for path in parser.parse_args().recordings:
        with without_collection():
            recording = Recording.open(path)
            began = [time.process_time()]
            analysed = analyse(recording)
            began.append(time.process_time())
            found = why(analysed)
            began.append(time.process_time())
            size = len(written(page([RunValues(analysed, found, str(path), recording.manifest)])))
            began.append(time.process_time())
        read_s, why_s, page_s = (after - before for before, after in pairwise(began))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{path}: reading {read_s:.1f} s, findings {why_s:.1f} s, page {page_s:.2f} s CPU; "
            f"{size:,} bytes; peak {peak:.1f} GB"
        )


if __name__ == "__main__":
    main()

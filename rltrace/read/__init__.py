"""Reads a Recording from the disk: whole or cut short, a folder or an archive.

In: the folder of a run, while it goes on or after any of its processes was killed. Out: a `Recording`, its processes
and their events, streamed, on one time line (`alignment.py`). `from rltrace import Recording` is its public name;
`recording.py` has the whole of it, `process.py` what each process says of itself and which of its segments are as they
were written, and `event_reader.py` matches the ends of its spans to their beginnings. Reading loads no recorder and no
framework, and works anywhere.

`columns.py` gives the same as numpy arrays, a hundred times as fast where `native/` was built.

`following.py` reads a Recording while it grows: each poll gives what was appended since the one before. `inferring.py`
adds the steps and phases that nobody marks, once they are over; `inferred.py` has the rules, and applies them to whole
processes.

`packed.py` restores segments that were replaced by compressed columns.

`cache.py` keeps what was computed of a large Recording until a file of it changes.

`gate.py` checks every field that was written, and `order.py` the times of a segment that has no checksum. `archive.py`
opens a Recording that is one file, `ending.py` knows how its command ended, `command_line.py` takes a recorded command
apart, and `perfetto_ui.py` serves a timeline to a browser, by a token that `token_file.py` keeps.

To add a kind of record, or a field of a process, see `record/`, which says what to change here. The rule by which
clocks are aligned is in `alignment.py`; `run/nodes.py` reads the clocks.
"""

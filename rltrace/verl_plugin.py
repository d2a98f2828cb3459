"""Joins the run when it is imported: verl loads its plug-ins and calls none of them (0.9.1, verl/__init__.py:69)."""

from rltrace.instrument import join_run

join_run()

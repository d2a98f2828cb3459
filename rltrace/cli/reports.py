"""What `rltrace check` found, as other programs read it: JUnit's XML, and annotations of GitHub."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from rltrace.analysis.checks import BROKEN, OK, UNJUDGED, Check, Checked
from rltrace.host.control_characters import visible

SUITE = "rltrace check"

ELEMENTS = {BROKEN: "failure", UNJUDGED: "error"}
LEVELS = {BROKEN: "error", UNJUDGED: "warning"}


def as_junit(found: Checked) -> str:
    """Return one test case for each limit: a broken one is a failure, one that cannot be judged an error."""
    states = [one.state for one in found.checks]
    counts = {"tests": len(states), "failures": states.count(BROKEN), "errors": states.count(UNJUDGED)}
    attributes = {"name": SUITE, **{name: str(many) for name, many in counts.items()}}
    suite = ET.Element("testsuite", attributes)
    for one in found.checks:
        case = ET.SubElement(suite, "testcase", classname=_text(found.path), name=_text(one.name), time="0")
        if one.state in ELEMENTS:
            told = ET.SubElement(case, ELEMENTS[one.state], message=_text(one.said), type=one.state)
            told.text = _text("; ".join([one.said, *found.notes]))
        else:
            ET.SubElement(case, "system-out").text = _text(one.said)
    suites = ET.Element("testsuites", attributes)
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def for_github(found: Checked) -> Iterator[str]:
    """Return GitHub's workflow commands: an error for each broken limit, a warning for each that cannot be judged."""
    for one in found.checks:
        if one.state != OK:
            yield _annotation(one, found)


def _annotation(one: Check, found: Checked) -> str:
    title = _escaped(f"{SUITE}: {one.name}").replace(":", "%3A").replace(",", "%2C")
    notes = found.notes if one.state == BROKEN else []
    return f"::{LEVELS[one.state]} title={title}::{_escaped('; '.join([f'{one.name}: {one.said}', *notes]))}"


def _escaped(text: str) -> str:
    return visible(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _text(text: str) -> str:
    """Return text without what XML cannot hold."""
    return visible(text).encode(errors="replace").decode()

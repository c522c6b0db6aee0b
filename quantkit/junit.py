"""JUnit reports: what CI systems show as a list of tests.

Source: the schema that Jenkins, GitLab and most GitHub actions read (testsuites, testsuite, testcase, failure, system-out).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree


@dataclass(frozen=True)
class Case:
    """One test: its name, why it failed (empty: it passed), and what else there is to say."""

    name: str
    failure: str = ""
    remark: str = ""


def write(path: Path, suite: str, cases: list[Case]) -> None:
    """Write the cases as one suite."""
    failed = str(sum(bool(case.failure) for case in cases))
    counts = {"tests": str(len(cases)), "failures": failed, "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    element = ElementTree.SubElement(root, "testsuite", {"name": suite, **counts})
    for case in cases:
        one = ElementTree.SubElement(element, "testcase", {"classname": suite, "name": case.name})
        if case.failure:
            ElementTree.SubElement(one, "failure", {"message": _clean(case.failure.splitlines()[0])}).text = _clean(case.failure)
        if case.remark:
            ElementTree.SubElement(one, "system-out").text = _clean(case.remark)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _clean(text: str) -> str:
    """Replace what XML cannot hold, such as control characters of a model's output."""
    return "".join(c if c in "\t\n\r" or "\x20" <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "\ufffd" for c in text)

"""What no stage of `.ci/run` has run, and why.

    python .ci/skipped.py RESULTS [--strict] [--explained=WORDS ...]

RESULTS is a folder of pytest's --junitxml files, one per stage. A test counts as skipped if every
stage that collected it skipped it; a file that was skipped as a whole, if no stage ran any of its
tests. Exit status 1 with --strict where a reason contains none of the WORDS.
"""

import argparse
import collections
import pathlib
import sys
import xml.etree.ElementTree as ET


def outcomes(folder: pathlib.Path) -> tuple[set[str], dict[str, str]]:
    """Names of the tests and files that ran, and reasons of those that a stage skipped."""
    ran, skipped = set(), {}
    files = sorted(folder.glob("*.xml"))
    if not files:
        sys.exit(f"error: no results in {folder}: expected *.xml files of pytest --junitxml there")
    for file in files:
        for case in ET.parse(file).iter("testcase"):
            name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
            reason = case.find("skipped")
            if reason is None:
                ran |= {name, case.get("classname")}
            else:
                text = (reason.text or "").rpartition("Skipped: ")[2].strip("')\"")
                whole_file = reason.get("message") == "collection skipped"
                skipped[name] = text if whole_file else reason.get("message")
    return ran, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--strict", action="store_true", help="an unexplained skip is an error")
    parser.add_argument("--explained", action="append", default=[], help="words of a reason")
    args = parser.parse_args()
    ran, skipped = outcomes(args.results)
    by_reason = collections.defaultdict(list)
    for name, reason in skipped.items():
        if name not in ran:
            by_reason[reason].append(name)
    bad = 0
    for reason, names in sorted(by_reason.items()):
        unexplained = args.strict and not any(words in reason for words in args.explained)
        bad += len(names) * unexplained
        print(f"{'NOT EXPLAINED: ' if unexplained else ''}{reason}: {len(names)} skipped")
        print(*(f"    {name}" for name in sorted(names)), sep="\n")
    total = sum(map(len, by_reason.values()))
    print(f"{len(ran)} tests and files ran, {total} were skipped in every stage")
    if bad:
        print(f"error: {bad} skipped without a reason that this machine explains", file=sys.stderr)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

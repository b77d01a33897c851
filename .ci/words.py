"""Finds phrases that read as translated, in prose, docstrings, comments and messages. `make lint` runs it.

    python .ci/words.py [FILE...]

Prints `file:line: phrase: better`, and exits with 1 if there are any. docs/contribute/index.md has the style.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A phrase (a regular expression, whole words, any case), and what to write instead.
PHRASES = {
    r"go(es)? on|going on|went on|gone on": "continue(s)",
    r"anew": "again",
    r"stands? in (the|a|its|their|for)|stands? there|stands? for": "is in, replaces",
    r"(is|are|was|be) told( of)?": "receives, knows",
    r"in the place of|in (its|their|his) place": "instead of",
    r"(what|whatever|that) becomes? of": "what happens to",
    r"all the same": "anyway",
    r"the like": "and so on",
    r"where(of|by|upon|in it)": "of which, by which",
    r"is to be had": "is available",
    r"has to hold true|holds true": "is true",
    r"whoever|whichever way": "a caller who, anyone who",
    r"somebody|nobody|everybody": "someone, no one, a caller",
    r"by (itself|themselves) alone": "alone",
    r"says? so": "say what is said",
    r"lets? (it|them) be": "leaves it",
    r"at hand": "available",
    r"thereby|therein|thereof|hereby": "so, in it, of it",
    r"as it (were|came|is written|stands)": "unchanged, as written",
    r"make(s)? sure of": "check(s)",
    r"a thing|things": "name it",
    r"beside": "next to, besides, and",
    r"(is|are|was|be) no (part|text|string|number|finite|sequence|logarithm|prefix|path|terminal|call)s?": "is not a",
}
_PATTERN = re.compile("|".join(rf"(?P<p{i}>\b(?:{phrase})\b)" for i, phrase in enumerate(PHRASES)), re.IGNORECASE)
_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".mjs", ".html"}
# The tiny models are cached by the text of the script that makes them.
_EXCLUDED = (
    "src/strands_sglang/local/scripts/make_tiny_models.py",
    "docs/changelog.md",
    "tests/fixtures",
    ".ci/words.py",
)
_KEPT = "# as released"
"""Ends a line with the words of an earlier release."""


def main() -> int:
    """Check the files named, or all that git tracks."""
    names = sys.argv[1:] or subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    found = 0
    for name in names:
        if not name.startswith(_EXCLUDED) and (Path(name).suffix in _SUFFIXES or name == "Makefile"):
            for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1):
                for match in _PATTERN.finditer("" if line.endswith(_KEPT) else line):
                    better = list(PHRASES.values())[int(match.lastgroup[1:])]
                    print(f"{name}:{number}: {match[0]!r}: {better}")
                    found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

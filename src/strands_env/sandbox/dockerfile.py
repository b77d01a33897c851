"""Dockerfiles as data (https://docs.docker.com/reference/dockerfile/), and what `.dockerignore` leaves out."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .world import ImageError

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
FLAGS = {"FROM": {"platform"}, "RUN": {"mount", "network"}, "COPY": {"from", "chown", "chmod", "link"}}
FLAGS["ADD"] = {"chown", "chmod", "link"}
KNOWN = {*FLAGS, "ENV", "ARG", "WORKDIR", "USER", "SHELL"}
# A world has no main process and no ports: programs are run by `execute`.
IGNORED = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"}
_HERE_DOCUMENT = re.compile(  # or what is quoted, in which there is none
    r"""(?:^|\s)\d*<<(-?)(["']?)([A-Za-z_][^\s"'<>|&;()]*)\2|'[^']*'|"(?:\\.|[^"\\])*"|\\."""
)
_CONTINUES = re.compile(r"(?<!\\)\\[ \t]*$")
_PIECE = re.compile(
    r"""'(?P<literal>[^']*)'|"(?P<quoted>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|(?P<space>\s+)|(?P<plain>[^'"\\\s]+)"""
)
_VARIABLE = re.compile(
    r"\\(?P<escaped>[\\$\"])|\$\{(?P<braced>\w+)(?:(?P<sign>:?[-+])(?P<word>(?:[^{}]|\{[^{}]*\})*))?\}"
    r"|\$(?P<name>\w+)|(?P<other>\$\{)"
)


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile.

    Attributes:
        line: Number of its first line.
        name: Its name in capitals.
        text: The rest, without flags; with here-documents.
        flags: Its flags.
    """

    line: int
    name: str
    text: str
    flags: Mapping[str, str]

    def values(self, variables: Mapping[str, str]) -> list[str]:
        """Return its arguments, of a list in JSON or of words."""
        as_list = json_list(self.text)
        if as_list is not None:
            return [expand(text, variables) for text in as_list]
        return words(self.text, variables)

    def flag(self, name: str, variables: Mapping[str, str]) -> str:
        """Return the value of a flag; empty if it is not there."""
        return expand(self.flags.get(name, ""), variables)

    def error(self, why: str) -> ImageError:
        """Return an error about this instruction."""
        return ImageError(f"line {self.line}: {self.name} {self.text[:80]}: {why}")


@dataclass
class Stage:
    """A stage: the instruction that begins it, and those that follow."""

    begin: Instruction
    instructions: list[Instruction] = field(default_factory=list)


def read_dockerfile(text: str) -> tuple[list[Instruction], list[Stage]]:
    """Return the arguments before the first stage, and the stages.

    Raises:
        ImageError: It has what is not supported, or no stage.
    """
    arguments: list[Instruction] = []
    stages: list[Stage] = []
    for each in _instructions(text):
        _check(each)
        if each.name == "FROM":
            stages.append(Stage(each))
        elif stages:
            stages[-1].instructions.append(each)
        elif each.name == "ARG":
            arguments.append(each)
        else:
            raise each.error("it comes before FROM")
    if not stages:
        raise ImageError("the Dockerfile has no FROM")
    return arguments, stages


def _instructions(text: str) -> Iterable[Instruction]:
    lines = text.split("\n")
    if any(re.match(r"#\s*escape\s*=\s*`", line) for line in lines[:3]):
        raise ImageError("line 1: another escape character is not supported")
    following = iter(enumerate(lines, 1))
    for number, line in following:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while _CONTINUES.search(line):
            _, more = next(following, (0, None))
            if more is None or (more.strip() and not more.lstrip().startswith("#")):
                line = line.rstrip()[:-1] + (more or "")
        name, _, rest = re.sub(r"\s", " ", line.strip(), count=1).partition(" ")
        flags: dict[str, str] = {}
        while flag := re.match(r"\s*--(\w+)(?:=(\S+))?\s", rest):
            flags[flag[1]] = " ".join([*flags.get(flag[1], "").split(), flag[2] or "true"])
            rest = rest[flag.end() :]
        found = _HERE_DOCUMENT.findall(rest) if name.upper() in ("RUN", "COPY", "ADD") else []
        documents = [each for each in found if each[2]]
        script = rest.strip()
        is_script = len(documents) == 1 and _HERE_DOCUMENT.fullmatch(script) is not None
        for dash, _, mark in documents:
            body = []
            for _, inner in following:
                inner = inner.lstrip("\t") if dash else inner
                body.append(inner)
                if inner == mark:
                    break
            else:
                raise ImageError(f"line {number}: the here-document does not end: no line is {mark}")
            script = "\n".join(body[:-1]) if is_script else "\n".join([script, *body])
        if documents and name.upper() != "RUN":
            raise ImageError(f"line {number}: here-documents of {name} are not supported")
        yield Instruction(number, name.upper(), script, flags)


def _check(each: Instruction) -> None:
    if each.name not in KNOWN | IGNORED:
        raise each.error("not supported")
    if each.name in IGNORED:
        return
    needed = 2 if each.name in ("COPY", "ADD") else 1
    given = [each.text] if each.name in ("RUN", "SHELL") and each.text else each.values({})
    if len(given) < needed:
        raise each.error("an argument is missing")
    if each.name == "RUN" and each.text.startswith("#!"):
        raise each.error("another interpreter is not supported: give it the here-document, as in RUN python3 <<END")
    for flag, value in each.flags.items():
        is_fine = flag in FLAGS.get(each.name, ())
        if flag == "mount":  # a cache is a folder that may be empty
            is_fine = all("type=cache" in mount.split(",") for mount in value.split())
        if flag == "network":
            is_fine = value == "default"
        if flag == "platform":
            is_fine = "$" in value or value == f"linux/{ARCHITECTURE}"
        if flag == "chmod":
            is_fine = re.fullmatch("[0-7]{3,4}", value) is not None
        if not is_fine:
            raise each.error(f"--{flag}={value} is not supported")
    if {"from", "chmod"} <= each.flags.keys():
        raise each.error("--chmod of another image's files is not supported")
    if "from" in each.flags and re.search(r"[*?[]", each.text.removeprefix("[")):
        raise each.error("patterns of another image's files are not supported: name its folder")
    if each.name == "ADD" and re.search(r"(https?|git|ssh)://|git@", each.text):
        raise each.error("addresses are not supported: fetch it with RUN")


def json_list(text: str) -> list[str] | None:
    """Return a list of texts in JSON; None if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(argument, str) for argument in found) else None


def words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split text at spaces that are not quoted, with variables in place; those in single quotes stay."""
    pieces = list(_PIECE.finditer(text))
    if "".join(piece[0] for piece in pieces) != text:
        raise ImageError(f"a quote is not closed: {text}")
    found: list[str] = []
    word: str | None = None
    for piece in pieces:
        kind, value = str(piece.lastgroup), piece[str(piece.lastgroup)]
        if kind == "space":
            found += [] if word is None else [word]
            word = None
            continue
        if kind in ("quoted", "plain"):
            value = expand(value, variables)
        word = (word or "") + value
    return found if word is None else [*found, word]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$name`, `${name}`, and with a word for what is unset (`-`, `+`) or empty, too (`:-`, `:+`).

    Raises:
        ImageError: It has another form.
    """

    def value(found: re.Match[str]) -> str:
        if found["escaped"] is not None:
            return found["escaped"]
        if found["other"] is not None:
            raise ImageError(f"this form of a variable is not supported: {text}")
        name, sign = found["braced"] or found["name"], found["sign"] or ""
        known = variables.get(name, "")
        is_there = bool(known) if sign.startswith(":") else name in variables
        if sign.endswith("-"):
            return known if is_there else expand(found["word"], variables)
        if sign.endswith("+"):
            return expand(found["word"], variables) if is_there else ""
        return known

    return _VARIABLE.sub(value, text)


def pairs(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the names and values of ENV or ARG, without an ARG that has no value."""
    found = words(instruction.text, variables)
    if "=" not in instruction.text.split()[0] and instruction.name == "ENV":  # the old form `ENV name value`
        return {found[0]: " ".join(found[1:])}
    return {name: value for name, sign, value in (word.partition("=") for word in found) if sign}


def ignores(text: str) -> Callable[[str, bool], bool]:
    """Return what tells whether `.dockerignore` leaves out a path of the context, which may be a folder."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = [(not line.startswith("!"), os.path.normpath(line.lstrip("! "))) for line in lines if line != "."]
    rules = [(leaves_out, _pattern(part)) for leaves_out, part in parts]
    beginnings = [re.split(r"[*?[]", part.lstrip("/"))[0] for leaves_out, part in parts if not leaves_out]

    def is_ignored(path: str, is_folder: bool) -> bool:
        inside = f"{path}/"
        may_have = path == "." or any(each.startswith(inside) or inside.startswith(each) for each in beginnings)
        if is_folder and may_have:  # some of its files may not be
            return False
        return next((leaves_out for leaves_out, pattern in reversed(rules) if pattern.fullmatch(path)), False)

    return is_ignored


def _pattern(text: str) -> re.Pattern[str]:
    as_regex = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.findall(r"\*\*/|\*\*|\*|\?|\[[^]]+\]|.", text.strip("/"))
    pattern = "".join(as_regex.get(piece, piece if len(piece) > 1 else re.escape(piece)) for piece in pieces)
    return re.compile(f"{pattern}(?:/.*)?", re.DOTALL)

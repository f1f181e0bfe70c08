"""Renews our part of a model card that a person has edited on the Hub; the rest stays theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass

BEGIN = "<!-- parallel-publish: begin. Each publication renews this part: write above or below. -->"
END = "<!-- parallel-publish: end -->"
# A person who edits a card may change the words in a mark, not what it begins with.
_SECTION = re.compile(
    r"<!-- parallel-publish: begin.*?-->.*?<!-- parallel-publish: end *-->", re.DOTALL
)
_HEAD = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"^([A-Za-z_][\w-]*)[ \t]*:", re.MULTILINE)


@dataclass(frozen=True)
class Merged:
    """A card, and what a person should know of how it came about."""

    text: str
    said: tuple[str, ...] = ()


def marked(body: str) -> str:
    """`body` between our marks."""
    return f"{BEGIN}\n\n{body.strip()}\n\n{END}\n"


def merge_cards(ours: str, theirs: str) -> Merged:
    """The card to send where `theirs` is on the Hub already.

    Their metadata and text stay. Metadata that they do not have, and the part between our marks,
    are taken from `ours`. A card of ours that has text around the marks, or none, was written by
    hand here: it is sent as it is.
    """
    theirs = theirs.removeprefix("\ufeff").replace("\r\n", "\n")
    our_head, our_body = _split(ours)
    section = _only_section(our_body)
    if section is None or _SECTION.sub("", our_body).strip():
        return Merged(ours)
    their_head, their_body = _split(theirs)
    head, kept = _merged_head(our_head, their_head)
    said = [f"keeps its own {', '.join(kept)}, other than what was to be sent"] if kept else []
    if _only_section(their_body) is not None:
        # A function: a backslash in the section is not a group of the pattern.
        body = _SECTION.sub(lambda found: section, their_body)
    else:
        body = "\n\n".join(part for part in (their_body.strip("\n"), section) if part) + "\n"
        if their_body.strip():
            said.append(
                "does not have our marks exactly once: its text is kept, and our part is "
                "added below"
            )
    return Merged(f"---\n{head}---\n{body}" if head else body, tuple(said))


def _split(text: str) -> tuple[str, str]:
    """Metadata, without its lines of dashes, and the text below."""
    found = _HEAD.match(text)
    return (found[1], text[found.end() :]) if found else ("", text)


def _only_section(body: str) -> str | None:
    found = _SECTION.findall(body)
    return str(found[0]) if len(found) == 1 else None


def _merged_head(ours: str, theirs: str) -> tuple[str, list[str]]:
    """Their metadata with the fields of ours that they lack, and fields in which both differ."""
    if not theirs.strip():
        return ours, []
    mine, there = _fields(ours), _fields(theirs)
    added = [text for name, text in mine.items() if name not in there]
    # `license: mit` and `license: "mit"` say the same.
    kept = [n for n, t in mine.items() if n in there and _plain(there[n]) != _plain(t)]
    return theirs.rstrip("\n") + "\n" + "".join(added), kept


def _fields(head: str) -> dict[str, str]:
    """Text of each top-level field, with the lines below it, by name."""
    starts = list(_KEY.finditer(head))
    ends = [found.start() for found in starts[1:]] + [len(head)]
    return {
        found[1]: head[found.start() : end].rstrip("\n") + "\n"
        for found, end in zip(starts, ends, strict=True)
    }


def _plain(text: str) -> str:
    return re.sub(r"[\s\"']+", "", text)

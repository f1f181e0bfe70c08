"""Sending a folder that is ready, and how that ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_ckpt.layout import belongs_to_weights
from parallel_config import ReportedError
from parallel_publish.bundle import bundle_files
from parallel_publish.card import CARD, CURVE
from parallel_publish.card_merge import merge_cards
from parallel_publish.client import note
from parallel_publish.hub import publish_files
from parallel_publish.retry import Stop, never
from parallel_publish.sharing import shareable_bytes
from parallel_publish.staging import command_for
from parallel_publish.target import Target


@dataclass(frozen=True, kw_only=True)
class Publication:
    """How publishing ended."""

    repo_id: str
    files: Mapping[str, int]
    """Bytes by path in the repository."""
    commit_url: str | None = None
    """None for a dry run, and when it failed."""
    error: ReportedError | None = None
    """Why it failed; nothing changed on the Hub then."""
    bundle: Path | None = None
    """Folder that was to be sent, where it was kept; None when none was made."""
    retry: str = ""
    """Command that sends it again."""

    @property
    def ok(self) -> bool:
        """Whether it did not fail."""
        return self.error is None

    def render(self) -> str:
        """Text for a person: what was sent, or why not and how to send it."""
        total = sum(self.files.values())
        listing = "\n".join(f"  {size:>14,}  {path}" for path, size in sorted(self.files.items()))
        if self.error is not None:
            kept = f"\n  kept:  {self.bundle}" if self.bundle else ""
            return f"not published: {self.error}{kept}\n  retry: {self.retry}"
        if self.commit_url is None:
            return f"would publish {len(self.files)} files, {total:,} bytes:\n{listing}"
        return f"published {len(self.files)} files, {total:,} bytes: {self.commit_url}"


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A bundle that is written and waits to be sent."""

    folder: Path
    target: Target

    @property
    def retry(self) -> str:
        """Command that sends it, should this process not come to it."""
        return command_for(self.folder, self.target)

    def send(self, on_note: Callable[[str], None] = note, stop: Stop = never) -> Publication:
        """Send it in one commit. No collective: one process calls it.

        A failure does not raise: see `Publication.error`. Nor does an end because of `stop`.
        """
        return send(self.folder, self.target, on_note, stop)


def send(folder: Path, target: Target, on_note: Callable[[str], None], stop: Stop) -> Publication:
    said: dict[str, None] = {}

    def renewed(theirs: bytes) -> bytes:
        # At each attempt anew, so the lines are collected and not said here.
        found = merge_cards(
            (folder / CARD).read_text(encoding="utf-8-sig"), theirs.decode(errors="replace")
        )
        said.update(dict.fromkeys(found.said))
        return found.text.encode()

    try:
        files = bundle_files(folder)
        url = publish_files(
            target,
            # Cleaned only on the way: the files in the folder stay as they are.
            {name: shareable_bytes(path) or path for name, path in files.items()},
            message="Publish the trained model",
            # Shards of a former model would be loaded with the new ones, and the new card may not
            # have a curve. Everything else stays: it may be a person's.
            replaces=lambda path: belongs_to_weights(path) or path == CURVE,
            merges={CARD: renewed},
            on_note=on_note,
            stop=stop,
        )
        for line in said:
            on_note(f"the card of {target.repo_id} {line}")
    except ReportedError as error:
        return Publication(
            repo_id=target.repo_id,
            files=_sizes(folder),
            error=error,
            bundle=folder,
            retry=command_for(folder, target),
        )
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return Publication(repo_id=target.repo_id, files=sizes, commit_url=url, bundle=folder)


def failed(
    folder: Path, target: Target, error: ReportedError, options: Sequence[str]
) -> Publication:
    """Nothing was built: the same command again is the way."""
    return Publication(
        repo_id=target.repo_id, files={}, error=error, retry=command_for(folder, target, options)
    )


def dry(folder: Path, target: Target) -> Publication:
    files = bundle_files(folder)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return Publication(repo_id=target.repo_id, files=sizes)


def _sizes(folder: Path) -> dict[str, int]:
    # Not bundle_files, which may be what failed.
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}

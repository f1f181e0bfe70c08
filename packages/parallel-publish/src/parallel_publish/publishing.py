"""Publishing a trained model: from the ranks that trained it, from a checkpoint, or from a bundle.

Whatever is published is a folder first. If the upload fails, that folder stays, and one command
sends it again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from parallel_ckpt import CheckpointNotFound, resolve_checkpoint
from parallel_ckpt.layout import TRAIN_CONFIG, StepFolder, belongs_to_weights
from parallel_ckpt.ranks import all_ranks
from parallel_ckpt.state.model import bare_module
from parallel_config import ConfigError
from parallel_config.checkpoint import parse_size
from parallel_publish.bundle import (
    Dtype,
    bundle_bytes,
    bundle_checkpoint,
    checked_card,
    left_out,
    num_bytes,
    refuse_damage,
    remove_bundle,
    seal,
    write_card,
)
from parallel_publish.card import CARD, CardInfo, card_problems, render_card
from parallel_publish.client import note
from parallel_publish.config import PublishConfig
from parallel_publish.errors import PublishError
from parallel_publish.preflight import preflight
from parallel_publish.pretrained import CONFIG, PreTrainedModel, save_pretrained
from parallel_publish.processors import Processor
from parallel_publish.publication import Publication, Staged, dry, failed, send
from parallel_publish.retry import Stop, Stopped, never
from parallel_publish.staging import (
    bundle_folder,
    card_options,
    check_disk,
    empty_folder,
    is_kept_bundle,
    weight_options,
)
from parallel_publish.target import Target


def preflight_publish(
    config: PublishConfig,
    *,
    card: CardInfo | None = None,
    staging: Path | None = None,
    needed_bytes: int | Callable[[], int] = 0,
    token: str | None = None,
) -> None:
    """Collective: every rank. Find out before training whether publishing will work.

    The main rank asks the Hub; all ranks get its error. `needed_bytes` may be a function, which is
    called there only. Does nothing, and no network call, when publishing is off.

    Raises:
        ConfigError: the card is wrong; the same on every rank.
        PublishError: the Hub would not take it, or the disk is too full; the same on every rank.
    """
    if not config.wants_hub:
        return

    def check() -> None:
        info = (card or CardInfo()).with_config(config)
        problems = list(card_problems(info))
        if problems:
            raise ConfigError(problems)
        if staging is not None:
            check_disk(staging, needed_bytes() if callable(needed_bytes) else needed_bytes)
        if config.enable:
            preflight(Target.of(config, token=token), card=render_card(info))
        # A branch of its own, so a preflight of its own: that is where the branch is made.
        if config.push_checkpoints:
            preflight(Target.of_checkpoints(config, token=token))

    all_ranks().from_main(check)


def publish_trained_model(
    model: nn.Module,
    config: PublishConfig,
    *,
    staging: str | Path,
    card: CardInfo | None = None,
    files: Mapping[str, str | bytes] | None = None,
    processors: Sequence[Processor] = (),
    train_config: str | None = None,
    max_shard_size: str = "5GB",
    token: str | None = None,
    on_note: Callable[[str], None] = note,
) -> Publication | None:
    """Collective: every rank. Gather the model into `staging` and publish it in one commit.

    The ranks part as soon as the folder is written: only the main rank waits for the network, and
    returns how it went; the others return None. Where more collectives follow, call
    `stage_trained_model`, and `send` what it returns once they are over. `files` are documents
    beside the weights, such as `config.json`, which a `PreTrainedModel` brings along. The model
    needs no methods, and none of its own is called.

    Raises:
        ReportedError: the same on every rank, when the folder could not be written. A failed
            upload does not raise: see `Publication.error`.
    """
    staged = stage_trained_model(
        model,
        config,
        staging=staging,
        card=card,
        files=files,
        processors=processors,
        train_config=train_config,
        max_shard_size=max_shard_size,
        token=token,
    )
    # No collective from here on: a slow network must not exceed the deadline of one.
    return staged.send(on_note) if all_ranks().is_main else None


def stage_trained_model(
    model: nn.Module,
    config: PublishConfig,
    *,
    staging: str | Path,
    card: CardInfo | None = None,
    files: Mapping[str, str | bytes] | None = None,
    processors: Sequence[Processor] = (),
    train_config: str | None = None,
    max_shard_size: str = "5GB",
    token: str | None = None,
) -> Staged:
    """Collective: every rank. The first half of `publish_trained_model`: gather and write.

    The Hub is not asked. Arguments and errors are the same.
    """
    folder = Path(staging).expanduser().absolute()
    ranks = all_ranks()
    target = ranks.together(lambda: Target.of(config, token=token))
    # Before the weights are gathered: a full disk is found in an instant, not after minutes.
    size = num_bytes(model)
    ranks.from_main(lambda: check_disk(folder, size))
    documents = dict(files or {}) | ({TRAIN_CONFIG: train_config} if train_config else {})
    inner = bare_module(model)
    # Every rank makes the document, because the error of an argument must reach all of them.
    if isinstance(inner, PreTrainedModel) and CONFIG not in documents:
        documents[CONFIG] = ranks.together(lambda: json.dumps(inner.config_document(), indent=2))
    save_pretrained(
        model, folder, files=documents, processors=processors, max_shard_size=max_shard_size
    )
    info = (card or CardInfo(train_config=train_config)).with_config(config)

    def finish() -> None:
        write_card(folder, info, repo_id=target.repo_id)
        # After the card, which is one of the files that it lists.
        seal(folder)

    ranks.from_main(finish)
    return Staged(folder=folder, target=target)


def publish_checkpoint(
    path: str | Path,
    config: PublishConfig,
    *,
    card: CardInfo | None = None,
    dtype: Dtype = "keep",
    max_shard_size: str = "5GB",
    staging: str | Path | None = None,
    dry_run: bool = False,
    token: str | None = None,
    on_note: Callable[[str], None] = note,
    stop: Stop = never,
) -> Publication:
    """Publish a committed checkpoint, or a folder with a model. No ranks needed.

    The Hub is asked first: nothing is built that could not be sent. A checkpoint's bundle is built
    in the folder `staging` (None: the run's), in the place of what a former try for the same
    repository has kept there, and stays only when the upload fails. A folder is a bundle that an
    earlier try has kept, or what `save_pretrained` or `convert` wrote; it gets a card if it has
    none. With `dry_run` everything is built and checked here, nothing is sent or asked, and nothing
    stays. Once `stop` is true it ends as soon as that harms nothing.

    Raises:
        ConfigError: there is nothing to publish, or it is damaged.
        PublishError: the folder for the bundle cannot be written, or the disk is too full.
    """
    target = Target.of(config, token=token)
    given = Path(path).expanduser().absolute()
    step = _checkpoint(given)
    limit = _bytes(max_shard_size)
    if step is None:
        # Refused and not ignored: the user would believe that the weights were changed.
        _refuse_changes(given, dtype, max_shard_size)
        info = (card or CardInfo()).with_config(config)
        return _publish_folder(given, target, info, config, dry_run, on_note, stop)
    info = (card or _card_of(step)).with_config(config)
    text = checked_card(info, repo_id=target.repo_id)
    # Sizes now, because that is quick and needs no network; checksums while the bundle is built.
    refuse_damage(step, "fast")
    root = Path(staging).expanduser().absolute() if staging else step.path.parent.parent
    options = [*card_options(config), *weight_options(dtype, max_shard_size)]
    if not dry_run:
        # The Hub is asked before the bundle is built, which takes as long as a copy of the model.
        error = _preflight_error(target, text, stop)
        if error is not None:
            return failed(step.path, target, error, options)
    check_disk(root, bundle_bytes(step, dtype=dtype, max_bytes=limit))
    folder = None if dry_run else bundle_folder(root, int(step.path.name), target)
    with empty_folder(root, folder) as bundle:
        result = None
        try:
            bundle_checkpoint(
                step.path, bundle, dtype=dtype, max_shard_size=max_shard_size, stop=stop
            )
            write_card(bundle, info, repo_id=target.repo_id)
            # After the card, which is one of the files that it lists.
            seal(bundle)
            result = dry(bundle, target) if dry_run else send(bundle, target, on_note, stop)
            return result
        except Stopped:
            error = PublishError.of(step.path, "is not published: stopped on request.")
            return failed(step.path, target, error, options)
        except OSError as error:
            raise PublishError.of(bundle, f"cannot be written: {error.strerror}.") from None
        finally:
            # A bundle is kept only when all of it was built and the Hub did not take it.
            if result is None or result.ok:
                shutil.rmtree(bundle, ignore_errors=True)


def _bytes(max_shard_size: str) -> int:
    try:
        return parse_size(max_shard_size)
    except ValueError as error:
        raise ConfigError.of("max_shard_size", f"= {error}") from None


def _refuse_changes(folder: Path, dtype: Dtype, max_shard_size: str) -> None:
    if dtype != "keep" or max_shard_size != "5GB":
        raise ConfigError.of(
            folder,
            "is not a checkpoint. The weights of a folder are sent as they are, without a change "
            "of dtype or max_shard_size.",
            "Publish the checkpoint.",
        )


def _publish_folder(
    given: Path,
    target: Target,
    info: CardInfo,
    config: PublishConfig,
    dry_run: bool,
    on_note: Callable[[str], None],
    stop: Stop,
) -> Publication:
    """Publish what lies in a folder; a card is written only once the Hub would take it."""
    others = left_out(given)
    if others:
        on_note(f"these are not files of a model and are not sent: {', '.join(others)}")
    card = given / CARD
    # A card that a person wrote is never replaced.
    text = _read_card(card, config, on_note) if card.is_file() else None
    fresh = checked_card(info, repo_id=target.repo_id) if text is None else None
    if dry_run:
        found = dry(given, target)
        written = {CARD: len(fresh.encode())} if fresh is not None else {}
        return replace(found, files={**found.files, **written})
    error = _preflight_error(target, text or fresh, stop)
    if error is not None:
        return failed(given, target, error, [] if fresh is None else [*card_options(config)])
    if fresh is not None:
        write_card(given, info, repo_id=target.repo_id)
    result = send(given, target, on_note, stop)
    if result.ok and is_kept_bundle(given):
        # It was kept for this try alone; a folder that a person named is theirs.
        remove_bundle(given, on_note)
    return result


def _read_card(card: Path, config: PublishConfig, on_note: Callable[[str], None]) -> str:
    """A card that is there already; says so when it is not what was asked for."""
    try:
        text = card.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(
            card, f"cannot be read: {error}.", "Write it again, as UTF-8."
        ) from None
    # The metadata at the top, which ends at the second line of dashes; in the text below, a
    # licence may be named for other reasons.
    head = text.split("\n---", 1)[0]
    asked = (config.license, config.base_model, *config.tags)
    lacks = [value for value in asked if value is not None and value not in head]
    if lacks:
        on_note(
            f"{card} is sent as it is, without {', '.join(lacks)}; move it away, and a new one is "
            "written"
        )
    return text


def _preflight_error(target: Target, card: str | None, stop: Stop) -> PublishError | None:
    try:
        preflight(target, card=card, stop=stop)
    except PublishError as error:
        return error
    return None


def _checkpoint(path: Path) -> StepFolder | None:
    """The checkpoint that is meant; None when `path` is a bundle.

    Raises:
        CheckpointNotFound: it is neither.
    """
    try:
        return StepFolder(resolve_checkpoint(path))
    except CheckpointNotFound:
        if path.is_dir() and any(belongs_to_weights(entry.name) for entry in path.iterdir()):
            return None
        raise


def _card_of(step: StepFolder) -> CardInfo:
    """A card from what the checkpoint itself knows."""
    from parallel_ckpt import read_manifest

    manifest = read_manifest(step)
    config = step.train_config
    return CardInfo(
        facts={
            "optimizer updates": manifest.step,
            "samples seen": manifest.samples_seen,
            "trained on": manifest.topology.describe(),
            "versions": ", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())),
        },
        train_config=config.read_text(encoding="utf-8-sig") if config.is_file() else None,
    )
